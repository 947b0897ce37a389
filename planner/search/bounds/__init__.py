"""What each part of the space can at best reach: prices per block, and true lower bounds made of them."""
