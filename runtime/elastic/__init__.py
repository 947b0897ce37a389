"""Processes that come and go: around torch's elastic agent.

- `launch.py`: starts the agent of this machine, and says in one line why a run ended.
- `meeting.py`: where the machines meet, which none of them closes because it failed to meet the others.
- `worker.py`: what each process of a run begins with: it ends with its agent, and leaves word when it fails.
- `draws.py`: random numbers of a step that do not depend on where a run was interrupted.
- `replicas.py`: replicas that are jobs of their own, joined by torchft.

Open to other rooms: `launch`, `draws`, `replicas`.
"""
