"""From an ended search to an answer: checked, with its rivals, its constraints' costs, or why there is none."""
