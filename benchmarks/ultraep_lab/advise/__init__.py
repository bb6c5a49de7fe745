"""What balancing would gain on named hardware, and which settings to choose."""
