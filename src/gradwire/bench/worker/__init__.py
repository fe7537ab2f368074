"""Workers on emulated hosts: their job file, their training loop and their messages."""
