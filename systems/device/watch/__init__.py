"""What looks on: the event log, labels of a profile, shares of time, clocks. Nothing here moves a byte."""
