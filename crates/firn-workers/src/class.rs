//! The kinds of work that firnd has threads for.

/// Tasks of one topic that run at a time. More of them at once gain nothing on one file.
pub const OF_A_TOPIC_MAX: usize = 16;

/// A kind of work, with threads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Calls that may hang in the backing, each with its topic: fsync, fallocate, seek, copy, and what is read while
    /// the threads of the transport are in calls that do not return. So many files may hang before the calls of
    /// others wait for one of theirs to end.
    Call,
    /// Work that does not ask the backing, so that it finds a thread also where all others hang: stalled writes that
    /// go on.
    Memory,
    /// A connection of the control socket each: 64, and 8 more that ask for the status or the end only.
    ControlClient,
    /// A connection of the data socket each, and those that wait for one: a process of a well-filled host each.
    DataClient,
    /// Jobs of the daemon that begin now and then, or once; one of each kind at a time.
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

    /// Threads at a time.
    pub const fn threads_max(self) -> usize {
        match self {
            Self::Call => 512,
            Self::Memory => 32,
            // One more than there are seats: the thread of a connection that just left may not have ended.
            Self::ControlClient => 2 * (64 + 8),
            Self::DataClient => 1024 + 16,
            Self::Job => 16,
        }
    }

    /// Name of the threads: at most 15 bytes (prctl(2), PR_SET_NAME).
    pub const fn thread_name(self) -> &'static str {
        match self {
            Self::Call => "firn-call",
            Self::Memory => "firn-work",
            Self::ControlClient => "firn-client",
            Self::DataClient => "firn-data",
            Self::Job => "firn-job",
        }
    }

    /// Of a thread's stack, where the platform's default is more than is needed.
    pub(crate) const fn stack_bytes(self) -> Option<usize> {
        match self {
            // Its threads answer short questions, and there may be many.
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
