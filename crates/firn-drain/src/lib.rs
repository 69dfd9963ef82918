//! Lanes and their threads: carry pieces from the arena to the backing.
