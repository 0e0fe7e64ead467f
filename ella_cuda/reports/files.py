"""The files of a run's folder."""

CHECKPOINT_FILE = "checkpoint.pt"
HISTORY_FILE = "history.json"  # of a finished run
DIARY_FILE = "progress.json"
