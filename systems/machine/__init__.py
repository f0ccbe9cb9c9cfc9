"""What the machine and the process have, and files that must survive: nothing here knows of models."""
