//! Lanes: the I/O servers of a mount, by their number.

/// One I/O server: its queue in the engine, its threads in `firn-drain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneIndex(u16);

impl LaneIndex {
    /// Every file is in this one until placement knows several servers.
    pub const FIRST: Self = Self(0);

    /// The lane with this number, counted from 0.
    pub(crate) const fn new(number: u16) -> Self {
        Self(number)
    }

    /// Its place in a table of all lanes.
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}
