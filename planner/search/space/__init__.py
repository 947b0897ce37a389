"""What there is to choose from: meshes, schedules and the rest, as numpy columns."""
