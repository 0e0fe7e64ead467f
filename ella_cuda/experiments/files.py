"""The files of a folder of runs."""

CONFIG_FILE = "config.json"  # the grid and the options it was started with
SUMMARY_FILE = "summary.json"  # the finished rows
ENVIRONMENT_FILE = "environment.json"  # versions and device, an entry for each session
UNSEALED = ("seconds",)  # of rows and diaries: what their digests do not cover, since sessions differ in it
