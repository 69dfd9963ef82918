//! The line of files that wait to be drained by one lane (one I/O server): chooses which file is next.
//!
//! A *run* is one write of contiguous bytes. There are two orders:
//!
//! **Interleaved.** The line is first in, first out. After each run, a file with more to write goes to the end.
//!
//! **Sequential.** The lane writes one file at a time, for the *turn* of this file:
//! * A turn ends when the file has nothing left to write, or after max(bytes pending when the turn began,
//!   [`TURN_BYTES`]). The next turn begins when no write of the file is in flight.
//! * *Awaited* files, for which a caller waits, as in fsync(2), come before all other files, in the order in which they
//!   became awaited.
//! * If an awaited file is in line, the turn of a file that is not awaited is interrupted after
//!   [`INTERRUPTIBLE_BYTES`]. It continues when no awaited file is left.
//!
//! An awaited file therefore waits for the files that were awaited before it, and for at most [`INTERRUPTIBLE_BYTES`]
//! and one run of one other file.
//!
//! Invariants
//! * A file stands in line at most once.
//! * In a sequential line only the file that has the turn has writes in flight. The exception is a file whose writes
//!   hang.
//! * The line has strong references only to files in line. A drop of the last reference closes the file, so it must
//!   happen outside the lock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Weak};

/// Minimum number of bytes before a turn ends for other files. The time to write them is long compared with a seek
/// between two files.
const TURN_BYTES: u64 = 256 << 20;
/// Number of bytes after which the turn of a file that is not awaited is interrupted: a slow disk writes them in half a
/// second.
const INTERRUPTIBLE_BYTES: u64 = 64 << 20;

/// The runs of a lane that are not completed. Their state decides whether another file's turn may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunsUnderWay {
    /// No run is under way, so the next turn may begin.
    None,
    /// Some runs make progress. In sequential order the present turn continues.
    Working,
    /// Some runs hang, so another turn may begin beside them.
    Hanging,
}

/// Files in line, in the order of the lane.
pub(crate) enum Line<T> {
    Interleaved(VecDeque<Arc<T>>),
    Sequential(Box<Turns<T>>),
}

impl<T> Line<T> {
    pub(crate) fn interleaved() -> Self {
        Self::Interleaved(VecDeque::new())
    }

    pub(crate) fn sequential() -> Self {
        Self::Sequential(Box::default())
    }

    /// Puts a file into line. The file must not be in line yet.
    pub(crate) fn push(&mut self, file: Arc<T>, is_awaited: bool) {
        match self {
            Self::Interleaved(files) => {
                const COMPARED_MAX: usize = 32;
                let is_in_line = |known: &Arc<T>| Arc::ptr_eq(known, &file);
                debug_assert!(
                    !files.iter().rev().take(COMPARED_MAX).any(is_in_line),
                    "a file stands in line twice"
                );
                files.push_back(file);
            }
            Self::Sequential(turns) => turns.push(file, is_awaited),
        }
    }

    /// Takes the next file, if one may begin beside the runs that are under way.
    pub(crate) fn pop(&mut self, runs: RunsUnderWay) -> Option<Arc<T>> {
        match self {
            Self::Interleaved(files) => files.pop_front(),
            Self::Sequential(turns) => turns.pop(runs),
        }
    }

    /// Records that a caller began to wait for a file, which may be in line. In a sequential line, moves the file ahead
    /// of the files that are not awaited.
    pub(crate) fn record_waiter(&mut self, file: &Arc<T>) {
        if let Self::Sequential(turns) = self {
            turns.record_waiter(file);
        }
    }

    /// Records that a run of `bytes` bytes was picked from a file. `pending`: number of the file's pending bytes,
    /// including this run.
    pub(crate) fn record_pick(&mut self, file: &Arc<T>, bytes: u64, pending: u64) {
        if let Self::Sequential(turns) = self {
            turns.record_pick(file, bytes, pending);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Self::Interleaved(files) => files.is_empty(),
            Self::Sequential(turns) => turns.places.is_empty(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Interleaved(files) => files.len(),
            Self::Sequential(turns) => turns.places.len(),
        }
    }

    /// Returns how often a file is in line, for the check that this is at most once.
    pub(crate) fn count(&self, file: &Arc<T>) -> usize {
        match self {
            Self::Interleaved(files) => {
                let is_it = |known: &&Arc<T>| Arc::ptr_eq(known, file);
                files.iter().filter(is_it).count()
            }
            Self::Sequential(turns) => {
                turns.assert_places();
                usize::from(turns.places.contains_key(&address(file)))
            }
        }
    }

    /// Returns the file that has the turn; `None` in an interleaved line.
    pub(crate) fn turn(&self) -> Option<Arc<T>> {
        match self {
            Self::Interleaved(_) => None,
            Self::Sequential(turns) => turns.turn.as_ref()?.file.upgrade(),
        }
    }
}

/// A sequential line: the turn, and the files that wait for theirs.
pub(crate) struct Turns<T> {
    /// Position of each file in line, by its address.
    places: HashMap<usize, LinePlace>,
    /// Files that are ready and not awaited, in the order in which they came.
    ready: BTreeMap<u64, Arc<T>>,
    /// Awaited files, in the order in which they became awaited.
    awaited: BTreeMap<u64, Arc<T>>,
    /// Last number that a file in `ready` or `awaited` got.
    last_number: u64,
    /// The present turn. It remains set while runs of its file are under way.
    turn: Option<Turn<T>>,
    /// The turn that continues when no awaited file is left. Its file is in line.
    interrupted: Option<Turn<T>>,
}

/// Where a file stands in a sequential line.
enum LinePlace {
    /// In `ready`, under this number.
    Ready(u64),
    /// In `awaited`.
    Awaited,
    /// The file has the turn and more bytes to write.
    Turn,
    /// The file's turn was interrupted.
    Interrupted,
}

/// The time in which a sequential lane writes one file.
struct Turn<T> {
    /// The file. While this reference exists, no other file gets its address.
    file: Weak<T>,
    /// The same file while it is in line, which keeps it alive.
    in_line: Option<Arc<T>>,
    /// Whether a caller waits for the file, so that its turn is not interrupted.
    is_awaited: bool,
    /// Bytes of the runs in this turn so far.
    bytes: u64,
    /// Number of bytes after which the turn is over; set by the first run.
    bytes_max: Option<u64>,
}

impl<T> Turn<T> {
    /// Begins the turn of a file.
    fn begin(file: &Arc<T>, is_awaited: bool) -> Self {
        Self {
            file: Arc::downgrade(file),
            in_line: None,
            is_awaited,
            bytes: 0,
            bytes_max: None,
        }
    }

    /// Returns whether this is the turn of `file`.
    fn is_of(&self, file: &Arc<T>) -> bool {
        std::ptr::eq(self.file.as_ptr(), Arc::as_ptr(file))
    }

    /// Returns whether the turn has written all that it may.
    fn is_over(&self) -> bool {
        self.bytes_max.is_some_and(|max| self.bytes >= max)
    }
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self {
            places: HashMap::new(),
            ready: BTreeMap::new(),
            awaited: BTreeMap::new(),
            last_number: 0,
            turn: None,
            interrupted: None,
        }
    }
}

/// Returns the key of a file in `places`.
fn address<T>(file: &Arc<T>) -> usize {
    Arc::as_ptr(file) as usize
}

impl<T> Turns<T> {
    /// Puts a file into line. A file that has the turn keeps it unless its turn is over.
    fn push(&mut self, file: Arc<T>, is_awaited: bool) {
        let key = address(&file);
        debug_assert!(
            !self.places.contains_key(&key),
            "a file stands in line twice"
        );
        let has_turn = |turn: &&mut Turn<T>| turn.is_of(&file) && !turn.is_over();
        if let Some(turn) = self.turn.as_mut().filter(has_turn) {
            turn.is_awaited |= is_awaited;
            turn.in_line = Some(file);
            self.places.insert(key, LinePlace::Turn);
            return;
        }
        self.push_at_end(file, is_awaited);
    }

    /// Puts a file at the end of the awaited files, or at the end of the ready files.
    fn push_at_end(&mut self, file: Arc<T>, is_awaited: bool) {
        self.last_number += 1;
        let number = self.last_number;
        let key = address(&file);
        if is_awaited {
            self.awaited.insert(number, file);
            self.places.insert(key, LinePlace::Awaited);
        } else {
            self.ready.insert(number, file);
            self.places.insert(key, LinePlace::Ready(number));
        }
    }

    /// Marks a file as awaited, and moves it among the awaited files if it is in line.
    fn record_waiter(&mut self, file: &Arc<T>) {
        if let Some(turn) = &mut self.turn
            && turn.is_of(file)
        {
            turn.is_awaited = true;
        }
        match self.places.get(&address(file)) {
            Some(LinePlace::Ready(number)) => {
                self.ready.remove(number);
            }
            Some(LinePlace::Interrupted) => self.interrupted = None,
            Some(LinePlace::Awaited | LinePlace::Turn) | None => return,
        }
        self.push_at_end(Arc::clone(file), true);
    }

    /// Counts a run of the file that has the turn. The first run sets the length of the turn.
    fn record_pick(&mut self, file: &Arc<T>, bytes: u64, pending: u64) {
        if let Some(turn) = &mut self.turn
            && turn.is_of(file)
        {
            turn.bytes_max.get_or_insert(pending.max(TURN_BYTES));
            turn.bytes += bytes;
        }
    }

    /// Takes the next file to write. If the file of the present turn is in line again, returns this file. Otherwise
    /// ends the turn and begins the next one. During its turn, a file is the only one that is written.
    ///
    /// Returns `None` if no file is in line, or if writes of the present turn must end first. `runs` says whether such
    /// writes are under way.
    fn pop(&mut self, runs: RunsUnderWay) -> Option<Arc<T>> {
        if let Some(turn) = &mut self.turn {
            // A file is awaited if a caller waits for its drain, as in fsync(2). A long turn of a file that is not
            // awaited is interrupted for awaited files.
            let must_be_interrupted =
                !turn.is_awaited && turn.bytes >= INTERRUPTIBLE_BYTES && !self.awaited.is_empty();
            if !must_be_interrupted && let Some(file) = turn.in_line.take() {
                self.places.remove(&address(&file));
                return Some(file);
            }
            // The next turn begins only when no write of this file is under way, or if its writes hang.
            if runs == RunsUnderWay::Working {
                return None;
            }
        }
        self.interrupt_turn();
        let (file, turn) = self.next_turn()?;
        self.places.remove(&address(&file));
        self.turn = Some(turn);
        Some(file)
    }

    /// Ends the turn. It continues later if its file is in line.
    fn interrupt_turn(&mut self) {
        let turn = self.turn.take();
        if let Some(turn) = turn
            && let Some(file) = &turn.in_line
        {
            self.places.insert(address(file), LinePlace::Interrupted);
            self.interrupted = Some(turn);
        }
    }

    /// Begins the next turn: of an awaited file, else the interrupted one, else of the first ready file.
    fn next_turn(&mut self) -> Option<(Arc<T>, Turn<T>)> {
        if let Some((_, file)) = self.awaited.pop_first() {
            let turn = Turn::begin(&file, true);
            return Some((file, turn));
        }
        if let Some(mut turn) = self.interrupted.take() {
            return Some((turn.in_line.take()?, turn));
        }
        let (_, file) = self.ready.pop_first()?;
        let turn = Turn::begin(&file, false);
        Some((file, turn))
    }

    /// Asserts that each file in line has one place, and that at most one file has the turn.
    fn assert_places(&self) {
        let has_turn = |place: &&LinePlace| matches!(place, LinePlace::Turn);
        let files_with_turn = self.places.values().filter(has_turn).count();
        let interrupted_files = usize::from(self.interrupted.is_some());
        let waiting_files = self.ready.len() + self.awaited.len() + interrupted_files;
        assert!(files_with_turn <= 1, "one file has its turn");
        assert_eq!(
            self.places.len(),
            waiting_files + files_with_turn,
            "places of files"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: u64 = 16 << 20;

    fn files<const N: usize>() -> [Arc<usize>; N] {
        std::array::from_fn(Arc::new)
    }

    /// Takes a run of the next file, which has `runs` more runs. Returns the file's number.
    fn write(line: &mut Line<usize>, runs: u64) -> usize {
        let file = line.pop(RunsUnderWay::None).expect("a file");
        line.record_pick(&file, RUN, RUN * (runs + 1));
        if runs > 0 {
            line.push(Arc::clone(&file), false);
        }
        assert_eq!(line.count(&file), usize::from(runs > 0));
        *file
    }

    #[test]
    fn interleaved_files_take_turns() {
        let [a, b] = files();
        let mut line = Line::interleaved();
        line.push(a, false);
        line.push(b, true);
        let order: Vec<_> = [2, 2, 1, 1, 0, 0].map(|runs| write(&mut line, runs)).into();
        assert_eq!(order, [0, 1, 0, 1, 0, 1]);
        assert!(line.is_empty());
    }

    #[test]
    fn a_sequential_lane_stays_with_a_file() {
        let [a, b] = files();
        let mut line = Line::sequential();
        line.push(a, false);
        line.push(b, false);
        let order: Vec<_> = [2, 1, 0, 1, 0].map(|runs| write(&mut line, runs)).into();
        assert_eq!(order, [0, 0, 0, 1, 1]);
        assert!(line.pop(RunsUnderWay::None).is_none());
    }

    #[test]
    fn the_next_file_begins_when_nothing_of_the_last_is_under_way() {
        let [a, b] = files();
        let mut line = Line::sequential();
        line.push(Arc::clone(&a), false);
        line.push(b, false);
        assert_eq!(line.pop(RunsUnderWay::None).as_deref(), Some(&0));
        assert!(line.pop(RunsUnderWay::Working).is_none());
        // A run of it failed in part.
        line.push(a, false);
        assert_eq!(line.pop(RunsUnderWay::Working).as_deref(), Some(&0));
        assert!(line.pop(RunsUnderWay::Working).is_none());
        assert_eq!(
            line.pop(RunsUnderWay::Hanging).as_deref(),
            Some(&1),
            "its writes hang"
        );
    }

    #[test]
    fn awaited_files_come_first_and_in_the_order_of_waiting() {
        let [a, b, c, d] = files();
        let mut line = Line::sequential();
        for file in [&a, &b, &c] {
            line.push(Arc::clone(file), false);
        }
        assert_eq!(write(&mut line, 1), 0);
        line.record_waiter(&c);
        line.push(d, true);
        line.record_waiter(&b);
        line.record_waiter(&c);
        let order: Vec<_> = [0, 0, 0, 0].map(|runs| write(&mut line, runs)).into();
        assert_eq!(order, [0, 2, 3, 1]);
        assert!(line.is_empty());
    }

    #[test]
    fn a_long_turn_is_interrupted_for_an_awaited_file_and_goes_on_before_others() {
        let [a, b, c] = files();
        let mut line = Line::sequential();
        line.push(a, false);
        line.push(b, false);
        assert_eq!(write(&mut line, 100), 0);
        line.push(c, true);
        let runs_before = (INTERRUPTIBLE_BYTES / RUN) as usize - 1;
        for _ in 0..runs_before {
            assert_eq!(write(&mut line, 90), 0);
        }
        let order: Vec<_> = [0, 80, 80].map(|runs| write(&mut line, runs)).into();
        assert_eq!(order, [2, 0, 0]);
    }

    #[test]
    fn a_turn_of_an_awaited_file_is_not_interrupted() {
        let [a, b] = files();
        let mut line = Line::sequential();
        line.push(Arc::clone(&a), false);
        assert_eq!(write(&mut line, 100), 0);
        line.record_waiter(&a);
        line.push(b, true);
        for left in (0..50).rev() {
            assert_eq!(write(&mut line, left), 0);
        }
        assert_eq!(write(&mut line, 0), 1);
    }

    #[test]
    fn a_file_that_is_written_for_ever_does_not_keep_the_lane() {
        let [a, b] = files();
        let mut line = Line::sequential();
        line.push(a, false);
        line.push(b, false);
        let runs = (TURN_BYTES / RUN) as usize;
        for _ in 0..runs {
            assert_eq!(write(&mut line, 1), 0);
        }
        assert_eq!(write(&mut line, 0), 1);
        assert_eq!(write(&mut line, 0), 0);
    }
}
