"""What runs on one device and knows nothing of ranks: attention kernels and the small operations around them."""
