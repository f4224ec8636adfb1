"""The hub beside other ways to pass messages between connected programs."""
