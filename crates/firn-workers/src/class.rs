//! The classes of work for which firnd (the process that serves a mount) has threads, and the limits of each class.
//!
//! A *topic* is the object on which calls may hang together, such as one file.

/// Maximum number of topics whose calls may hang while calls of other topics still find a thread. It allows for 500
/// files (docs/SEMANTICS.md, S-error-11). A file has up to three topics: for calls by its name, for calls by its inode,
/// and for drops of its pages from the kernel's cache.
pub const TOPICS_MAX: usize = 3 * 512;
/// Maximum number of tasks of one topic that run at a time. More tasks at once are not faster on one file.
pub const TOPIC_TASKS_MAX: usize = 16;
/// Maximum number of tasks that run at a time in addition to the first task of each topic, over all topics. These
/// tasks exist for speed only. Without this bound, a few hanging files with many callers each would occupy all
/// threads.
pub const EXTRA_TASKS_MAX: usize = 64;

/// A class of work, which has its own threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Calls of the backing, which may hang; each has a topic. Examples are fsync, fallocate, lseek and
    /// copy_file_range. The class also takes any request that arrives while the threads of the transport are in calls
    /// that do not return.
    Call,
    /// Work without calls of the backing, which continues even if every call hangs: writes that waited for memory and
    /// found room.
    Memory,
    /// One task for each connection of the control socket, on which tools send requests to firnd: 64 connections, and 8
    /// more for requests of the status or the end.
    ControlClient,
    /// One task for each connection of the data socket, on which client processes ask for direct access to files, and
    /// for each waiting connection. The bound allows for a process on each core of a large host.
    DataClient,
    /// Jobs that firnd does once or occasionally, one of each kind at a time.
    Job,
}

impl Class {
    pub(crate) const ALL: [Self; 5] = [
        Self::Call,
        Self::Memory,
        Self::ControlClient,
        Self::DataClient,
        Self::Job,
    ];

    /// Returns the maximum number of threads of the class.
    pub const fn threads_max(self) -> usize {
        match self {
            Self::Call => TOPICS_MAX + EXTRA_TASKS_MAX,
            Self::Memory => 32,
            // Twice the number of connections, because the thread of a closed connection may not have ended.
            Self::ControlClient => 2 * (64 + 8),
            Self::DataClient => 1024 + 16,
            Self::Job => 16,
        }
    }

    /// Returns the name of the threads, of at most 15 bytes (prctl(2), PR_SET_NAME).
    pub const fn thread_name(self) -> &'static str {
        match self {
            Self::Call => "firn-call",
            Self::Memory => "firn-work",
            Self::ControlClient => "firn-client",
            Self::DataClient => "firn-data",
            Self::Job => "firn-job",
        }
    }

    /// Returns the stack size of a thread. Returns `None` if the default of the platform is used.
    pub(crate) const fn stack_bytes(self) -> Option<usize> {
        match self {
            // These threads answer short requests, and there may be many of them.
            Self::DataClient => Some(256 << 10),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_its_place_and_a_name_that_the_kernel_takes() {
        for (index, class) in Class::ALL.into_iter().enumerate() {
            assert_eq!(class as usize, index);
            assert!(class.thread_name().len() <= 15);
        }
    }
}
