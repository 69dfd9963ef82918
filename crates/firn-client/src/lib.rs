//! A process's connection to firnd.
