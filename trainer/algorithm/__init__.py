"""What is learned from a batch: advantages, the policy loss and its parts. Pure tensor functions; start at ``loss``."""
