//! Random operations of three hosts on a few files, compared with a model of the order of changes. Hosts are killed at
//! any call and come back, and files are flattened at any time.
//!
//! The model knows which changes each change follows: the earlier ones of its own host, and those of other hosts that
//! were closed or synced before its host opened or synced the file. Each byte must have the value of a change that no
//! other change of the byte follows. All hosts, and the flat file, must agree on the value.
//!
//! Several hosts cut at the same time. As POSIX demands, a cut follows all changes that existed when it began, and
//! precedes all changes that begin after it returned. Its order with changes under way is free. To have changes under
//! way at the same time, a call of one host sometimes stops at one of its calls of the backing while other hosts act.
//!
//! Variants
//! * Listings of directories lag. A host need not see other hosts' changes before it lists anew. Until then it reads
//!   what the file once had, and its changes lose nothing of what other hosts write.
//! * Attributes and names of directories lag.
//! * Live hosts are taken for dead, and continue.
//!
//! `FIRN_OPS` sets a higher number of operations, `FIRN_SEED` another first seed.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use crate::common;

use common::{Ground, SimLanes, containers, read, read_unchecked};
use firn_backing::{Access, Backing, Errno, Files, Names, RenameFlags, Volume};
use firn_log::{LogBacking, Setup, WhenClosed};
use firn_sim::{SimBacking, suite};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const HOSTS: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 3] = ["x", "y", "z"];
const FILE_BYTES: u64 = 400;
/// Number of steps in one world.
const STEPS: u64 = 80;
/// If listings lag, all hosts list anew once in this many steps, and must then agree.
const LAG_STEPS: u32 = 6;

/// Returns the seeds to run: `count` of them, or more if `FIRN_OPS` asks for more.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = number("FIRN_SEED").unwrap_or(1);
    let ops = number("FIRN_OPS").unwrap_or(0);
    first..first + count.max(ops / STEPS)
}

/// A change of a file.
#[derive(Clone, Debug)]
enum Change {
    /// write(2) of a range. All bytes have the number of the change.
    Write(std::ops::Range<u64>),
    /// ftruncate(2), which cuts the file or extends it.
    SetLen(u64),
    /// fallocate(2), which only extends the file.
    Grow(u64),
    /// fallocate(2) that zeros a range and keeps the length.
    Zero(std::ops::Range<u64>),
}

/// A change with its place in the order.
#[derive(Clone, Debug)]
struct Op {
    host: usize,
    /// Number of the change among those of its host.
    number: usize,
    /// How many changes of each host precede it.
    after: [usize; 3],
    change: Change,
    /// The value of its bytes.
    mark: u8,
    /// Whether the host died in the change, so that it may have been made in full, in part or not at all.
    is_doubtful: bool,
    /// When it began and when it ended.
    time: std::ops::Range<u64>,
}

/// Whether a host sees all that other hosts have appended when it refreshes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visibility {
    Fresh,
    Lag,
}

impl Op {
    /// Returns whether this change precedes `other`.
    fn is_before(&self, other: &Self, looks: Visibility) -> bool {
        if self.host == other.host {
            return self.number < other.number;
        }
        if self.number < other.after[self.host] {
            return true;
        }
        // A host sets a length by what it sees. If it has not seen this change, it may have nothing to do.
        let is_seen = match other.change {
            Change::SetLen(_) | Change::Grow(_) => looks == Visibility::Fresh,
            Change::Write(_) | Change::Zero(_) => true,
        };
        let is_earlier = self.time.end <= other.time.start;
        is_earlier && is_seen && (self.is_cut() || other.is_cut())
    }

    fn is_cut(&self) -> bool {
        matches!(self.change, Change::SetLen(_))
    }

    /// Returns the value that the change gives to a byte: `None` if it does not change it, and `Some(None)` if the byte
    /// becomes zero or is cut off.
    fn value_at(&self, offset: u64) -> Option<Option<u8>> {
        match &self.change {
            Change::Write(range) => range.contains(&offset).then_some(Some(self.mark)),
            Change::Zero(range) => range.contains(&offset).then_some(None),
            Change::SetLen(len) => (*len <= offset).then_some(None),
            Change::Grow(_) => None,
        }
    }

    /// Returns how long the change makes the file at least.
    fn end(&self) -> u64 {
        match &self.change {
            Change::Write(range) => range.end,
            Change::SetLen(len) | Change::Grow(len) => *len,
            Change::Zero(_) => 0,
        }
    }

    /// Returns whether the change cuts the byte before `end`.
    fn cuts(&self, end: u64) -> bool {
        matches!(self.change, Change::SetLen(len) if len < end)
    }
}

/// The changes of one file.
#[derive(Default)]
struct Model {
    ops: Vec<Op>,
    /// Number of changes that have begun.
    begun: u8,
    /// Number of changes of each host.
    counts: [usize; 3],
    /// Number of changes of each host that were closed or synced.
    published: [usize; 3],
    /// For each host, how many changes of each host precede its next change.
    known: [[usize; 3]; 3],
}

/// What is known when a change begins.
struct ChangeStart {
    mark: u8,
    after: [usize; 3],
    at: u64,
}

impl Model {
    fn begin(&mut self, host: usize, at: u64) -> ChangeStart {
        self.begun += 1;
        ChangeStart {
            mark: self.begun,
            after: self.known[host],
            at,
        }
    }

    fn add(
        &mut self,
        host: usize,
        change: Change,
        is_doubtful: bool,
        begun: &ChangeStart,
        end: u64,
    ) {
        self.ops.push(Op {
            host,
            number: self.counts[host],
            after: begun.after,
            change,
            mark: begun.mark,
            is_doubtful,
            time: begun.at..end,
        });
        self.counts[host] += 1;
    }

    /// Publishes all changes of a host, as a close or sync does.
    fn publish(&mut self, host: usize) {
        self.published[host] = self.counts[host];
    }

    /// Orders the next changes of a host after all published ones, as an open or sync does.
    fn learn(&mut self, host: usize) {
        for other in 0..HOSTS.len() {
            let known = &mut self.known[host][other];
            *known = self.published[other].max(*known);
        }
    }

    /// Returns the values that a byte may have. `None` stands for a byte beyond the end or in a hole.
    fn allowed_values(&self, offset: u64, looks: Visibility) -> Vec<Option<u8>> {
        let ops = self.ops.iter();
        let here: Vec<(&Op, Option<u8>)> = ops
            .filter_map(|op| Some((op, op.value_at(offset)?)))
            .collect();
        let certain = || here.iter().filter(|(op, _)| !op.is_doubtful);
        let is_last = |op: &Op| !certain().any(|(other, _)| op.is_before(other, looks));
        let mut values: Vec<Option<u8>> = here
            .iter()
            .filter(|(op, _)| is_last(op))
            .map(|(_, value)| *value)
            .collect();
        if certain().next().is_none() {
            values.push(None);
        }
        values
    }

    /// Returns the minimum length of the file: by the changes that certainly no shorter cut follows.
    fn min_len(&self, looks: Visibility) -> u64 {
        let certain = self.ops.iter().filter(|op| !op.is_doubtful);
        let may_be_cut = |op: &Op| {
            let cuts = self.ops.iter().filter(|other| other.cuts(op.end()));
            cuts.into_iter().any(|other| !other.is_before(op, looks))
        };
        let stays = certain.filter(|op| !may_be_cut(op));
        stays.map(Op::end).max().unwrap_or(0)
    }

    /// Returns the maximum length of the file: by the changes that may have escaped all cuts.
    fn max_len(&self, looks: Visibility) -> u64 {
        let left = |op: &Op| {
            let cuts = self.ops.iter().filter(|other| !other.is_doubtful);
            let later = cuts.filter(|other| other.cuts(op.end()) && op.is_before(other, looks));
            later.map(Op::end).min().unwrap_or(op.end())
        };
        self.ops.iter().map(left).max().unwrap_or(0)
    }

    /// Returns whether a byte may have had this value at some time.
    fn may_have_been(&self, offset: u64, byte: u8) -> bool {
        byte == 0
            || self
                .ops
                .iter()
                .any(|op| op.value_at(offset) == Some(Some(byte)))
    }

    /// Fails if the file must not have these bytes.
    fn check(&self, bytes: &[u8], looks: Visibility) -> Result<(), String> {
        let len = bytes.len() as u64;
        let allowed = self.min_len(looks)..=self.max_len(looks);
        if !allowed.contains(&len) {
            return Err(format!("{len} bytes, and {allowed:?} are allowed"));
        }
        for offset in 0..FILE_BYTES + 200 {
            let found = bytes
                .get(offset as usize)
                .copied()
                .filter(|byte| *byte != 0);
            let allowed_values = self.allowed_values(offset, looks);
            if !allowed_values.contains(&found) {
                return Err(format!(
                    "byte {offset} is {found:?}, not one of {allowed_values:?}"
                ));
            }
        }
        Ok(())
    }
}

type Logged<G> = LogBacking<<G as Ground>::Base>;
type File<G> = <Logged<G> as Volume>::File;

struct Host<G: Ground> {
    ground: G,
    backing: Arc<Logged<G>>,
    /// The open files, each with its inode number.
    open: Vec<(u64, Arc<File<G>>)>,
}

/// What disturbs the hosts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disturbance {
    None,
    /// Listings of directories lag.
    Lag,
    /// Attributes and names of directories lag.
    AttributeLag,
    /// Live hosts are taken for dead.
    Stall,
}

struct World<G: Ground> {
    seed: u64,
    /// Logical time, raised by each event.
    time: u64,
    /// Whether a host is stopped inside a call.
    is_in_call: bool,
    /// How often a host was stopped inside a call while others acted.
    interleaved_calls: u64,
    disturbance: Disturbance,
    /// How often a host read an old state because listings lag.
    stale_reads: u64,
    random: StdRng,
    ground: G,
    /// The disks without logs.
    plain: G::Base,
    alive: Arc<Mutex<HashSet<String>>>,
    hosts: Vec<Host<G>>,
    names: HashMap<&'static str, u64>,
    /// The models, by inode number of the file.
    models: HashMap<u64, Model>,
    steps: Vec<String>,
}

impl<G: Ground> World<G> {
    fn new(seed: u64, disturbance: Disturbance) -> Self {
        let ground = G::new();
        let alive: HashSet<String> = HOSTS.map(String::from).into();
        let alive = Arc::new(Mutex::new(alive));
        let hosts = HOSTS.map(|name| begin_host(&ground, name, &alive, disturbance));
        Self {
            seed,
            time: 0,
            is_in_call: false,
            interleaved_calls: 0,
            disturbance,
            stale_reads: 0,
            random: StdRng::seed_from_u64(seed),
            plain: ground.open("plain"),
            ground,
            alive,
            hosts: hosts.into(),
            names: HashMap::new(),
            models: HashMap::new(),
            steps: Vec::new(),
        }
    }

    /// Fails the test with the seed and all steps.
    fn fail(&self, what: &str) -> ! {
        let steps = self.steps.join("\n");
        panic!("seed {}: {what}; after\n{steps}", self.seed);
    }

    fn note(&mut self, step: String) {
        self.steps.push(step);
    }

    fn name(&mut self) -> &'static str {
        NAMES[self.random.random_range(0..NAMES.len())]
    }

    fn lags(&self) -> bool {
        self.disturbance == Disturbance::Lag
    }

    fn looks(&self) -> Visibility {
        if self.lags() {
            Visibility::Lag
        } else {
            Visibility::Fresh
        }
    }

    fn now(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// Makes a call of a host. Sometimes the call stops at one of its calls of the backing while other hosts act.
    fn call<T: Send>(
        &mut self,
        host: usize,
        call: impl FnOnce(&Logged<G>) -> Result<T, Errno> + Send,
    ) -> Result<T, Errno>
    where
        Logged<G>: Send + Sync,
    {
        let backing = Arc::clone(&self.hosts[host].backing);
        if self.is_in_call || self.lags() || self.random.random_ratio(2, 3) {
            return call(&backing);
        }
        let calls = self.random.random_range(1..30);
        let hang = {
            let disk = self.hosts[host].ground.disks()[0];
            disk.hang_at(disk.steps() + calls)
        };
        std::thread::scope(|scope| {
            let called = scope.spawn(|| call(&backing));
            while !hang.is_reached() && !called.is_finished() {
                std::thread::yield_now();
            }
            if hang.is_reached() {
                self.is_in_call = true;
                self.interleaved_calls += 1;
                self.note(format!("{} is at its call {calls}", HOSTS[host]));
                for _ in 0..self.random.random_range(1..5) {
                    let other = (host + self.random.random_range(1..3)) % HOSTS.len();
                    self.act(other);
                }
                self.note(format!("{} goes on", HOSTS[host]));
                self.is_in_call = false;
            }
            drop(hang);
            called.join().expect("a call")
        })
    }

    /// Makes a host act while another one is stopped inside a call.
    fn act(&mut self, host: usize) {
        match self.random.random_range(0..8) {
            0 => self.open(host),
            1..6 => self.change(host),
            6 => self.sync(host),
            _ => self.close(host),
        }
    }

    /// Makes a live host count as dead, or alive again.
    fn toggle_alive(&mut self) {
        let host = HOSTS[self.random.random_range(0..HOSTS.len())];
        let was_alive = self.alive.lock().remove(host);
        if !was_alive {
            self.alive.lock().insert(host.into());
        }
        self.note(format!("{host} is taken for dead: {was_alive}"));
    }

    fn step(&mut self) {
        if self.disturbance == Disturbance::Stall && self.random.random_ratio(1, 8) {
            self.toggle_alive();
        }
        let host = self.random.random_range(0..HOSTS.len());
        let dies = self.random.random_ratio(1, 25);
        if dies {
            let calls = self.random.random_range(1..25);
            self.hosts[host].ground.crash_after(calls);
        }
        match self.random.random_range(0..20) {
            0..4 => self.open(host),
            4..11 => self.change(host),
            11 | 12 => self.sync(host),
            13..16 => self.close(host),
            16 => self.rename(host),
            17 => self.unlink(host),
            _ => self.settle(host),
        }
        if dies {
            self.kill(host);
        }
        self.check_step();
    }

    /// Returns the value of a result, or `None` if the host died in the call. Any other error fails the test.
    fn expect_alive<T>(&mut self, host: usize, what: &str, outcome: Result<T, Errno>) -> Option<T> {
        let is_dead = self.hosts[host].ground.is_dead();
        match outcome {
            Ok(value) => Some(value),
            Err(_) if is_dead => None,
            Err(error) => self.fail(&format!("{what} on {}: {error}", HOSTS[host])),
        }
    }

    /// If listings lag, makes the host list anew from now on, or not. Returns whether it does.
    fn begin_fresh_listings(&mut self, host: usize) -> bool {
        let looks = !self.lags() || self.random.random();
        if looks {
            self.hosts[host].ground.set_listing_lag(None);
        }
        looks
    }

    /// Makes the host's listings lag again, if they lag in this world.
    fn restore_lag(&mut self, host: usize) {
        if self.lags() {
            let seed = self.random.random();
            self.hosts[host].ground.set_listing_lag(Some(seed));
        }
    }

    fn open(&mut self, host: usize) {
        let name = self.name();
        let looks = self.begin_fresh_listings(host);
        self.note(format!("{} opens {name}, looks: {looks}", HOSTS[host]));
        let truncates = self.random.random_ratio(1, 4);
        let opened = {
            let backing = &self.hosts[host].backing;
            let root = backing.root();
            match backing.lookup(&root, OsStr::new(name)) {
                Ok((inode, attr)) => {
                    let file = backing.open(&inode, Access::ReadWrite);
                    file.map(|file| (attr.ino, file))
                }
                Err(Errno::NOENT) => {
                    let me = suite::own_caller();
                    let made = backing.create(&me, &root, OsStr::new(name), 0o644);
                    made.map(|(_, file, attr)| (attr.ino, file))
                }
                Err(error) => Err(error),
            }
        };
        if let Some((ino, file)) = self.expect_alive(host, "open", opened) {
            self.names.insert(name, ino);
            let model = self.models.entry(ino).or_default();
            if looks {
                model.learn(host);
            }
            let file = Arc::new(file);
            self.hosts[host].open.push((ino, Arc::clone(&file)));
            // An open with O_TRUNC.
            if truncates {
                self.apply_change(host, ino, &file, Change::SetLen(0));
            }
        }
        self.restore_lag(host);
    }

    /// Chooses one of the files that a host has open.
    fn choose_open(&mut self, host: usize) -> Option<usize> {
        let count = self.hosts[host].open.len();
        (count > 0).then(|| self.random.random_range(0..count))
    }

    fn change(&mut self, host: usize) {
        let Some(opened) = self.choose_open(host) else {
            return;
        };
        let ino = self.hosts[host].open[opened].0;
        if self.models[&ino].begun > 200 {
            return;
        }
        let file = Arc::clone(&self.hosts[host].open[opened].1);
        let start = self.random.random_range(0..FILE_BYTES);
        let end = start + self.random.random_range(1..150);
        let change = match self.random.random_range(0..20) {
            0..4 => Change::SetLen(start),
            4 => Change::SetLen(0),
            // Sets the length that this host sees, as all ranks do at the end of a job.
            5 | 6 => match self.hosts[host].backing.attr_of_file(&file) {
                Ok(attr) => Change::SetLen(attr.size),
                Err(_) => return,
            },
            7 => Change::Grow(start),
            8 => Change::Zero(start..end),
            _ => Change::Write(start..end),
        };
        self.apply_change(host, ino, &file, change);
    }

    /// Makes a change on a host and adds it to the model.
    fn apply_change(&mut self, host: usize, ino: u64, file: &Arc<File<G>>, change: Change) {
        self.note(format!("{} makes {change:?} to {ino}", HOSTS[host]));
        let now = self.now();
        let model = self.models.get_mut(&ino).expect("known");
        let begun = model.begin(host, now);
        let outcome = match &change {
            Change::SetLen(len) => self.call(host, |backing| backing.set_len(file, *len)),
            Change::Grow(len) => self.call(host, |backing| backing.allocate(file, 0, 0, *len)),
            Change::Zero(range) => {
                let (mode, len) = (libc::FALLOC_FL_ZERO_RANGE, range.end - range.start);
                let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
                self.call(host, |backing| {
                    backing.allocate(file, mode, range.start, len)
                })
            }
            Change::Write(range) => {
                let data = vec![begun.mark; (range.end - range.start) as usize];
                let write = |backing: &Logged<G>| {
                    backing.write_at(file, &[IoSlice::new(&data)], range.start)
                };
                let written = self.call(host, write);
                written.map(|count| assert_eq!(count, data.len()))
            }
        };
        let is_refused = outcome == Err(Errno::INVAL) && matches!(change, Change::Grow(0));
        let is_doubtful = !is_refused && self.expect_alive(host, "a change", outcome).is_none();
        // A zeroed range may end at the length that the host sees, so bytes beyond it may keep their values.
        let is_doubtful = is_doubtful || matches!(change, Change::Zero(_));
        let end = self.now();
        let model = self.models.get_mut(&ino).expect("known");
        model.add(host, change, is_doubtful, &begun, end);
    }

    fn sync(&mut self, host: usize) {
        let Some(opened) = self.choose_open(host) else {
            return;
        };
        let looks = self.begin_fresh_listings(host);
        let Host { backing, open, .. } = &self.hosts[host];
        let (ino, file) = &open[opened];
        let ino = *ino;
        let outcome = backing.sync(file, false);
        self.note(format!("{} syncs {ino}, looks: {looks}", HOSTS[host]));
        if self.expect_alive(host, "sync", outcome).is_some() {
            let model = self.models.get_mut(&ino).expect("known");
            model.publish(host);
            if looks {
                model.learn(host);
            }
        }
        self.restore_lag(host);
    }

    fn close(&mut self, host: usize) {
        let Some(opened) = self.choose_open(host) else {
            return;
        };
        let (ino, file) = self.hosts[host].open.swap_remove(opened);
        self.note(format!("{} closes {ino}", HOSTS[host]));
        drop(file);
        if !self.hosts[host].open.iter().any(|(other, _)| *other == ino) {
            self.models.get_mut(&ino).expect("known").publish(host);
        }
    }

    fn settle(&mut self, host: usize) {
        self.note(format!("{} settles", HOSTS[host]));
        let left = self.hosts[host].backing.settle();
        let outcome = left.error.map_or(Ok(()), Err);
        self.expect_alive(host, "settle", outcome);
    }

    fn rename(&mut self, host: usize) {
        let from = self.name();
        let to = self.name();
        self.note(format!("{} renames {from} to {to}", HOSTS[host]));
        if from != to {
            self.close_elsewhere(host, to);
        }
        let backing = &self.hosts[host].backing;
        let root = backing.root();
        let from_name = OsStr::new(from);
        let to_name = OsStr::new(to);
        let outcome = backing.rename(&root, from_name, &root, to_name, RenameFlags::empty());
        self.finish_naming(host, outcome);
    }

    fn unlink(&mut self, host: usize) {
        let name = self.name();
        self.note(format!("{} removes {name}", HOSTS[host]));
        self.close_elsewhere(host, name);
        let backing = &self.hosts[host].backing;
        let outcome = backing.unlink(&backing.root(), OsStr::new(name));
        self.finish_naming(host, outcome);
    }

    /// Closes a file on all other hosts before it loses its name. No promise covers later reads through them.
    fn close_elsewhere(&mut self, host: usize, name: &str) {
        let Some(&removed_ino) = self.names.get(name) else {
            return;
        };
        for (number, other) in self.hosts.iter_mut().enumerate() {
            if number != host {
                other.open.retain(|(ino, _)| *ino != removed_ino);
            }
        }
    }

    fn finish_naming(&mut self, host: usize, outcome: Result<(), Errno>) {
        if outcome != Err(Errno::NOENT) {
            self.expect_alive(host, "a change of names", outcome);
        }
        self.names.clear();
        for name in NAMES {
            if let Ok((_, attr)) = self.plain.lookup(&self.plain.root(), OsStr::new(name)) {
                self.names.insert(name, attr.ino);
            }
        }
    }

    /// Kills a host and starts it again.
    fn kill(&mut self, host: usize) {
        let name = HOSTS[host];
        self.note(format!("{name} dies"));
        self.hosts[host].ground.end_process();
        self.alive.lock().remove(name);
        if self.random.random_ratio(1, 2) {
            let other = (host + 1) % HOSTS.len();
            self.settle(other);
        }
        self.alive.lock().insert(name.into());
        self.hosts[host] = begin_host(&self.ground, name, &self.alive, self.disturbance);
        self.restore_lag(host);
        self.finish_naming(host, Ok(()));
    }

    fn check_step(&mut self) {
        if !self.lags() {
            return self.check();
        }
        self.check_stale_read();
        if self.random.random_ratio(1, LAG_STEPS) {
            (0..HOSTS.len()).for_each(|host| self.hosts[host].ground.set_listing_lag(None));
            self.check();
            (0..HOSTS.len()).for_each(|host| self.restore_lag(host));
        }
    }

    /// Checks that a host that reads old listings reads only values that the bytes once had.
    fn check_stale_read(&mut self) {
        let name = self.name();
        let host = self.random.random_range(0..HOSTS.len());
        let bytes = match read_unchecked(&*self.hosts[host].backing, name) {
            Ok(found) => found.map_or_else(Vec::new, |(bytes, _)| bytes),
            Err(error) => self.fail(&format!("{} glances at {name}: {error}", HOSTS[host])),
        };
        let model = self.names.get(name).and_then(|ino| self.models.get(ino));
        let Some(model) = model else {
            return;
        };
        for (offset, byte) in (0..).zip(&bytes) {
            if !model.may_have_been(offset, *byte) {
                self.fail(&format!("{name}: byte {offset} never was {byte}"));
            }
        }
        self.stale_reads += u64::from(model.check(&bytes, Visibility::Lag).is_err());
    }

    /// Checks that two hosts read the same bytes of each file, and that the model allows them.
    fn check(&mut self) {
        for name in NAMES {
            let reader = self.random.random_range(0..HOSTS.len());
            let found = self.read(reader, name);
            let other = self.read((reader + 1) % HOSTS.len(), name);
            if found != other {
                self.fail(&format!("{name} differs: {found:?}, {other:?}"));
            }
            let Some(ino) = self.names.get(name) else {
                assert_eq!(found, None);
                continue;
            };
            let bytes = found.unwrap_or_default();
            if let Some(model) = self.models.get(ino)
                && let Err(error) = model.check(&bytes, self.looks())
            {
                self.fail(&format!("{name} ({ino}): {error}"));
            }
        }
    }

    fn read(&self, host: usize, name: &str) -> Option<Vec<u8>> {
        match read(&*self.hosts[host].backing, name) {
            Ok(found) => found,
            Err(error) => self.fail(&format!("{} reads {name}: {error}", HOSTS[host])),
        }
    }

    /// Closes and flattens all files, and checks the plain files and that no container is left.
    fn end(mut self) {
        for host in &mut self.hosts {
            host.ground.set_listing_lag(None);
            host.open.clear();
        }
        self.alive.lock().extend(HOSTS.map(String::from));
        let expected = NAMES.map(|name| self.read(0, name));
        // The next open finishes what dead hosts left.
        for (name, ino) in self.names.clone() {
            let backing = &self.hosts[0].backing;
            let (inode, attr) = backing
                .lookup(&backing.root(), OsStr::new(name))
                .expect("lookup");
            assert_eq!(attr.ino, ino);
            drop(backing.open(&inode, Access::ReadWrite).expect("open"));
        }
        for _ in 0..3 {
            for host in 0..HOSTS.len() {
                self.settle(host);
            }
        }
        for (name, expected) in NAMES.into_iter().zip(expected) {
            let found = read(&self.plain, name).expect("read");
            if found != expected {
                self.fail(&format!("{name}, flat: {found:?}, {expected:?}"));
            }
        }
        // Each host finishes the removals in which it died.
        for host in &self.hosts {
            host.backing.end_removals().expect("end");
        }
        let orphans = self.hosts[0].backing.find_orphans().expect("find");
        // A host that removes a file without having seen its logs does not mark them.
        assert!(self.lags() || orphans.lost.is_empty(), "{orphans:?}");
        let mut remaining = containers(&self.plain);
        remaining.retain(|name| !orphans.lost.contains(name));
        if !remaining.is_empty() {
            self.fail(&format!("left: {remaining:?}"));
        }
        for name in orphans.lost {
            let is_of = |ino: &u64| name.starts_with(&format!("{ino:016x}-"));
            assert!(!self.names.values().any(is_of), "{name} has its file");
        }
        self.hosts
            .iter()
            .for_each(|host| G::finish_removals(host.backing.below()));
    }
}

fn begin_host<G: Ground>(
    ground: &G,
    name: &str,
    alive: &Arc<Mutex<HashSet<String>>>,
    disturbance: Disturbance,
) -> Host<G> {
    let ground = ground.another_process();
    if disturbance == Disturbance::AttributeLag {
        ground.set_attribute_lag(xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
    }
    let alive = Arc::clone(alive);
    let setup = Setup {
        host: name.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(move |host| Ok(alive.lock().contains(host))),
        view_age_max: Duration::ZERO,
        // A dead host waits for the backing too, so the time is short.
        lag_max: match disturbance {
            Disturbance::AttributeLag => Duration::from_millis(100),
            Disturbance::None | Disturbance::Lag | Disturbance::Stall => Duration::ZERO,
        },
        unit_bytes: 100,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    let backing = LogBacking::open(ground.open(name), setup).expect("open");
    Host {
        // Little memory, so that indexes are sorted.
        backing: Arc::new(backing.with_memory(64 << 10)),
        ground,
        open: Vec::new(),
    }
}

/// Proves S-log-35.
#[test]
fn hosts_agree_on_what_the_order_of_changes_allows() {
    let worlds = seeds(100).map(|seed| run_world::<SimBacking>(seed, Disturbance::None));
    let interleaved_calls: u64 = worlds.map(|counts| counts.interleaved_calls).sum();
    assert!(
        interleaved_calls > 100,
        "{interleaved_calls}: no changes were under way at the same time"
    );
}

/// Proves S-log-35, where the logs lie in lanes.
#[test]
fn hosts_agree_where_their_logs_lie_in_lanes() {
    for seed in seeds(60) {
        run_world::<SimLanes>(seed, Disturbance::None);
    }
}

/// Proves S-log-39.
#[test]
fn hosts_agree_once_they_have_read_the_directories_anew() {
    let worlds = seeds(100).map(|seed| run_world::<SimBacking>(seed, Disturbance::Lag));
    let stale_reads: u64 = worlds.map(|counts| counts.stale_reads).sum();
    assert!(stale_reads > 20, "{stale_reads}: the listings did not lag");
}

/// Proves S-log-72.
#[test]
fn hosts_agree_where_the_backing_is_a_moment_behind() {
    for seed in seeds(60) {
        run_world::<SimBacking>(seed, Disturbance::AttributeLag);
    }
}

/// Proves S-log-34.
#[test]
fn hosts_that_are_taken_for_dead_lose_nothing() {
    for seed in seeds(100) {
        run_world::<SimBacking>(seed, Disturbance::Stall);
    }
}

/// Counts of what happened in a world.
struct WorldCounts {
    /// How often a host read an old state because listings lag.
    stale_reads: u64,
    /// How often a host was stopped inside a call while others acted.
    interleaved_calls: u64,
}

fn run_world<G: Ground>(seed: u64, disturbance: Disturbance) -> WorldCounts {
    let mut world = World::<G>::new(seed, disturbance);
    if world.lags() {
        (0..HOSTS.len()).for_each(|host| world.restore_lag(host));
    }
    for _ in 0..STEPS {
        world.step();
    }
    let counts = WorldCounts {
        stale_reads: world.stale_reads,
        interleaved_calls: world.interleaved_calls,
    };
    world.end();
    counts
}
