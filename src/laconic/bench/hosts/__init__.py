"""Workers on emulated hosts: what they are told to do, how they do it, and what they say."""
