"""What is below everything: files, this machine, installed releases, HTTP, the control token."""
