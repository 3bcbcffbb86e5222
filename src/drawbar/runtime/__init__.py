"""What a process knows about itself and its peers: place, device, process group, seeds, logs."""
