//! Random operations of three hosts on a few files, beside a model of what the order of changes promises; hosts are
//! killed at any call, come back, and flatten at any time.
//!
//! The model knows which changes each change comes after: those of its own host before it, and those of others that were
//! closed or synced before its host opened or synced the file. Each byte must be that of a change after which none
//! comes that has the byte, and all hosts, and the flat file, must agree on which.
//!
//! Several hosts cut at the same time. A cut comes before all that begins when it has returned, and, as POSIX has it, after
//! all that was there when it began; what is under way with it has its order with it. So that changes are under way at the
//! same time, a call of one host stops now and then at one of its calls of the backing, while another one does what it
//! wants.
//!
//! The same where listings of directories lag: a host need not learn of others before it has read them anew. What it reads
//! until then is what the file once had, and nothing of what others write is lost by what it does. And the same where hosts
//! are taken for dead, one and all, and go on.
//!
//! `FIRN_OPS` asks for more operations, `FIRN_SEED` for other seeds.

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
const STEPS: u64 = 80;
/// Where listings lag, hosts read them anew after this many steps, and agree then.
const LAG_STEPS: u32 = 6;

fn seeds(count: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = number("FIRN_SEED").unwrap_or(1);
    let ops = number("FIRN_OPS").unwrap_or(0);
    first..first + count.max(ops / STEPS)
}

#[derive(Clone, Debug)]
enum Change {
    /// All bytes have the number of the change.
    Write(std::ops::Range<u64>),
    /// ftruncate(2), which cuts the file or makes it longer.
    SetLen(u64),
    /// fallocate(2), which makes it longer at most.
    Grow(u64),
    /// The same, with bytes that become zeros.
    Zero(std::ops::Range<u64>),
}

/// A change, and which of each host come before it.
#[derive(Clone, Debug)]
struct Op {
    host: usize,
    number: usize,
    after: [usize; 3],
    change: Change,
    /// The value of its bytes.
    mark: u8,
    /// It was made or not, or in part: its host died in it.
    is_doubtful: bool,
    /// When it began and ended.
    time: std::ops::Range<u64>,
}

/// Whether hosts see what others have appended when they look.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Looks {
    Fresh,
    Lag,
}

impl Op {
    fn is_before(&self, other: &Self, looks: Looks) -> bool {
        if self.host == other.host {
            return self.number < other.number;
        }
        if self.number < other.after[self.host] {
            return true;
        }
        // A host sets a length by what it sees: one that has not seen the other change may have nothing to do.
        let is_seen = match other.change {
            Change::SetLen(_) | Change::Grow(_) => looks == Looks::Fresh,
            Change::Write(_) | Change::Zero(_) => true,
        };
        let is_earlier = self.time.end <= other.time.start;
        is_earlier && is_seen && (self.is_cut() || other.is_cut())
    }

    fn is_cut(&self) -> bool {
        matches!(self.change, Change::SetLen(_))
    }

    /// What it makes of a byte; none if nothing, and none of none if the file may end before it.
    fn at(&self, offset: u64) -> Option<Option<u8>> {
        match &self.change {
            Change::Write(range) => range.contains(&offset).then_some(Some(self.mark)),
            Change::Zero(range) => range.contains(&offset).then_some(None),
            Change::SetLen(len) => (*len <= offset).then_some(None),
            Change::Grow(_) => None,
        }
    }

    /// Least length of the file when the change was made.
    fn end(&self) -> u64 {
        match &self.change {
            Change::Write(range) => range.end,
            Change::SetLen(len) | Change::Grow(len) => *len,
            Change::Zero(_) => 0,
        }
    }

    /// Whether it takes the byte before `end`.
    fn cuts(&self, end: u64) -> bool {
        matches!(self.change, Change::SetLen(len) if len < end)
    }
}

/// What is known of one file.
#[derive(Default)]
struct Model {
    ops: Vec<Op>,
    /// Changes that were begun.
    begun: u8,
    counts: [usize; 3],
    /// Of each host, the changes that were closed or synced.
    published: [usize; 3],
    /// What the next change of each host comes after.
    known: [[usize; 3]; 3],
}

/// What a host knows when it begins a change.
struct Begun {
    mark: u8,
    after: [usize; 3],
    at: u64,
}

impl Model {
    fn begin(&mut self, host: usize, at: u64) -> Begun {
        self.begun += 1;
        Begun {
            mark: self.begun,
            after: self.known[host],
            at,
        }
    }

    fn add(&mut self, host: usize, change: Change, is_doubtful: bool, begun: &Begun, end: u64) {
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

    fn publish(&mut self, host: usize) {
        self.published[host] = self.counts[host];
    }

    fn learn(&mut self, host: usize) {
        for other in 0..HOSTS.len() {
            let known = &mut self.known[host][other];
            *known = self.published[other].max(*known);
        }
    }

    /// Values that a byte may have; none is one after the end, or a hole.
    fn candidates(&self, offset: u64, looks: Looks) -> Vec<Option<u8>> {
        let ops = self.ops.iter();
        let here: Vec<(&Op, Option<u8>)> =
            ops.filter_map(|op| Some((op, op.at(offset)?))).collect();
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

    /// Least length of the file: by the changes after which, for certain, no shorter cut comes.
    fn least_len(&self, looks: Looks) -> u64 {
        let certain = self.ops.iter().filter(|op| !op.is_doubtful);
        let may_be_cut = |op: &Op| {
            let cuts = self.ops.iter().filter(|other| other.cuts(op.end()));
            cuts.into_iter().any(|other| !other.is_before(op, looks))
        };
        let stays = certain.filter(|op| !may_be_cut(op));
        stays.map(Op::end).max().unwrap_or(0)
    }

    /// Greatest length: by the changes that no cut took for certain.
    fn most_len(&self, looks: Looks) -> u64 {
        let left = |op: &Op| {
            let cuts = self.ops.iter().filter(|other| !other.is_doubtful);
            let later = cuts.filter(|other| other.cuts(op.end()) && op.is_before(other, looks));
            later.map(Op::end).min().unwrap_or(op.end())
        };
        self.ops.iter().map(left).max().unwrap_or(0)
    }

    /// Whether a byte once had this value, or may have been a hole or cut off.
    fn knows(&self, offset: u64, byte: u8) -> bool {
        byte == 0 || self.ops.iter().any(|op| op.at(offset) == Some(Some(byte)))
    }

    fn check(&self, bytes: &[u8], looks: Looks) -> Result<(), String> {
        let len = bytes.len() as u64;
        let allowed = self.least_len(looks)..=self.most_len(looks);
        if !allowed.contains(&len) {
            return Err(format!("{len} bytes, and {allowed:?} are allowed"));
        }
        for offset in 0..FILE_BYTES + 200 {
            let found = bytes
                .get(offset as usize)
                .copied()
                .filter(|byte| *byte != 0);
            let candidates = self.candidates(offset, looks);
            if !candidates.contains(&found) {
                return Err(format!(
                    "byte {offset} is {found:?}, not one of {candidates:?}"
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
    /// With the inode number of the file.
    open: Vec<(u64, Arc<File<G>>)>,
}

/// What is not as it should be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    /// Listings of directories lag.
    Lag,
    /// Attributes lag, and names of directories.
    Behind,
    /// Hosts are taken for dead that are not.
    Stall,
}

struct World<G: Ground> {
    seed: u64,
    /// Grows from event to event.
    time: u64,
    /// A host is in the midst of a call.
    is_within: bool,
    /// How often that was so.
    met: u64,
    trouble: Trouble,
    /// How often a host saw less for that.
    outdated: u64,
    random: StdRng,
    ground: G,
    /// The ground as it is without logs.
    plain: G::Base,
    alive: Arc<Mutex<HashSet<String>>>,
    hosts: Vec<Host<G>>,
    names: HashMap<&'static str, u64>,
    /// By inode number.
    models: HashMap<u64, Model>,
    steps: Vec<String>,
}

impl<G: Ground> World<G> {
    fn new(seed: u64, trouble: Trouble) -> Self {
        let ground = G::new();
        let alive: HashSet<String> = HOSTS.map(String::from).into();
        let alive = Arc::new(Mutex::new(alive));
        let hosts = HOSTS.map(|name| begin_host(&ground, name, &alive, trouble));
        Self {
            seed,
            time: 0,
            is_within: false,
            met: 0,
            trouble,
            outdated: 0,
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
        self.trouble == Trouble::Lag
    }

    fn looks(&self) -> Looks {
        if self.lags() {
            Looks::Lag
        } else {
            Looks::Fresh
        }
    }

    fn now(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// Makes a call of a host. Now and then it stops at one of its calls of the backing, and other hosts do something.
    fn call<T: Send>(
        &mut self,
        host: usize,
        call: impl FnOnce(&Logged<G>) -> Result<T, Errno> + Send,
    ) -> Result<T, Errno>
    where
        Logged<G>: Send + Sync,
    {
        let backing = Arc::clone(&self.hosts[host].backing);
        if self.is_within || self.lags() || self.random.random_ratio(2, 3) {
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
                self.is_within = true;
                self.met += 1;
                self.note(format!("{} is at its call {calls}", HOSTS[host]));
                for _ in 0..self.random.random_range(1..5) {
                    let other = (host + self.random.random_range(1..3)) % HOSTS.len();
                    self.act(other);
                }
                self.note(format!("{} goes on", HOSTS[host]));
                self.is_within = false;
            }
            drop(hang);
            called.join().expect("a call")
        })
    }

    /// What a host does while another one is in the midst of a call.
    fn act(&mut self, host: usize) {
        match self.random.random_range(0..8) {
            0 => self.open(host),
            1..6 => self.change(host),
            6 => self.sync(host),
            _ => self.close(host),
        }
    }

    /// Others take a host for dead that they took to live, or see it again.
    fn stall(&mut self) {
        let host = HOSTS[self.random.random_range(0..HOSTS.len())];
        let was_alive = self.alive.lock().remove(host);
        if !was_alive {
            self.alive.lock().insert(host.into());
        }
        self.note(format!("{host} is taken for dead: {was_alive}"));
    }

    fn step(&mut self) {
        if self.trouble == Trouble::Stall && self.random.random_ratio(1, 8) {
            self.stall();
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

    /// None if the host died in it.
    fn done<T>(&mut self, host: usize, what: &str, outcome: Result<T, Errno>) -> Option<T> {
        let is_dead = self.hosts[host].ground.is_dead();
        match outcome {
            Ok(value) => Some(value),
            Err(_) if is_dead => None,
            Err(error) => self.fail(&format!("{what} on {}: {error}", HOSTS[host])),
        }
    }

    /// Whether the host reads all listings anew from here on.
    fn begin_look(&mut self, host: usize) -> bool {
        let looks = !self.lags() || self.random.random();
        if looks {
            self.hosts[host].ground.set_listing_lag(None);
        }
        looks
    }

    /// Whether listings lag again for the host.
    fn end_look(&mut self, host: usize) {
        if self.lags() {
            let seed = self.random.random();
            self.hosts[host].ground.set_listing_lag(Some(seed));
        }
    }

    fn open(&mut self, host: usize) {
        let name = self.name();
        let looks = self.begin_look(host);
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
        if let Some((ino, file)) = self.done(host, "open", opened) {
            self.names.insert(name, ino);
            let model = self.models.entry(ino).or_default();
            if looks {
                model.learn(host);
            }
            let file = Arc::new(file);
            self.hosts[host].open.push((ino, Arc::clone(&file)));
            // O_TRUNC.
            if truncates {
                self.make(host, ino, &file, Change::SetLen(0));
            }
        }
        self.end_look(host);
    }

    /// One of the files that a host has open.
    fn opened(&mut self, host: usize) -> Option<usize> {
        let count = self.hosts[host].open.len();
        (count > 0).then(|| self.random.random_range(0..count))
    }

    fn change(&mut self, host: usize) {
        let Some(opened) = self.opened(host) else {
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
            // To the length that this host sees, as all ranks do at the end.
            5 | 6 => match self.hosts[host].backing.attr_of_file(&file) {
                Ok(attr) => Change::SetLen(attr.size),
                Err(_) => return,
            },
            7 => Change::Grow(start),
            8 => Change::Zero(start..end),
            _ => Change::Write(start..end),
        };
        self.make(host, ino, &file, change);
    }

    fn make(&mut self, host: usize, ino: u64, file: &Arc<File<G>>, change: Change) {
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
        let is_doubtful = !is_refused && self.done(host, "a change", outcome).is_none();
        // Bytes beyond the end that the host sees stay as they are.
        let is_doubtful = is_doubtful || matches!(change, Change::Zero(_));
        let end = self.now();
        let model = self.models.get_mut(&ino).expect("known");
        model.add(host, change, is_doubtful, &begun, end);
    }

    fn sync(&mut self, host: usize) {
        let Some(opened) = self.opened(host) else {
            return;
        };
        let looks = self.begin_look(host);
        let Host { backing, open, .. } = &self.hosts[host];
        let (ino, file) = &open[opened];
        let ino = *ino;
        let outcome = backing.sync(file, false);
        self.note(format!("{} syncs {ino}, looks: {looks}", HOSTS[host]));
        if self.done(host, "sync", outcome).is_some() {
            let model = self.models.get_mut(&ino).expect("known");
            model.publish(host);
            if looks {
                model.learn(host);
            }
        }
        self.end_look(host);
    }

    fn close(&mut self, host: usize) {
        let Some(opened) = self.opened(host) else {
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
        self.done(host, "settle", outcome);
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
        self.end_naming(host, outcome);
    }

    fn unlink(&mut self, host: usize) {
        let name = self.name();
        self.note(format!("{} removes {name}", HOSTS[host]));
        self.close_elsewhere(host, name);
        let backing = &self.hosts[host].backing;
        let outcome = backing.unlink(&backing.root(), OsStr::new(name));
        self.end_naming(host, outcome);
    }

    /// Other hosts close what is to lose its name: what they read of it afterwards is not promised.
    fn close_elsewhere(&mut self, host: usize, name: &str) {
        let Some(&doomed) = self.names.get(name) else {
            return;
        };
        for (number, other) in self.hosts.iter_mut().enumerate() {
            if number != host {
                other.open.retain(|(ino, _)| *ino != doomed);
            }
        }
    }

    fn end_naming(&mut self, host: usize, outcome: Result<(), Errno>) {
        if outcome != Err(Errno::NOENT) {
            self.done(host, "a change of names", outcome);
        }
        self.names.clear();
        for name in NAMES {
            if let Ok((_, attr)) = self.plain.lookup(&self.plain.root(), OsStr::new(name)) {
                self.names.insert(name, attr.ino);
            }
        }
    }

    /// Its processes end, and it comes back.
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
        self.hosts[host] = begin_host(&self.ground, name, &self.alive, self.trouble);
        self.end_look(host);
        self.end_naming(host, Ok(()));
    }

    fn check_step(&mut self) {
        if !self.lags() {
            return self.check();
        }
        self.glance();
        if self.random.random_ratio(1, LAG_STEPS) {
            (0..HOSTS.len()).for_each(|host| self.hosts[host].ground.set_listing_lag(None));
            self.check();
            (0..HOSTS.len()).for_each(|host| self.end_look(host));
        }
    }

    /// What a host reads by old listings is not made up.
    fn glance(&mut self) {
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
            if !model.knows(offset, *byte) {
                self.fail(&format!("{name}: byte {offset} never was {byte}"));
            }
        }
        self.outdated += u64::from(model.check(&bytes, Looks::Lag).is_err());
    }

    /// All hosts see the same bytes of a file, and the model allows them.
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

    /// Everything is closed, flattened, and ordinary.
    fn end(mut self) {
        for host in &mut self.hosts {
            host.ground.set_listing_lag(None);
            host.open.clear();
        }
        self.alive.lock().extend(HOSTS.map(String::from));
        let expected = NAMES.map(|name| self.read(0, name));
        // The next open ends what a dead host left.
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
        // Each host ends what it was at when it died.
        for host in &self.hosts {
            host.backing.end_removals().expect("end");
        }
        let orphans = self.hosts[0].backing.find_orphans().expect("find");
        // A host that removes a file without having seen its logs does not mark them for removal.
        assert!(self.lags() || orphans.lost.is_empty(), "{orphans:?}");
        let mut left = containers(&self.plain);
        left.retain(|name| !orphans.lost.contains(name));
        if !left.is_empty() {
            self.fail(&format!("left: {left:?}"));
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
    trouble: Trouble,
) -> Host<G> {
    let ground = ground.another_process();
    if trouble == Trouble::Behind {
        ground.set_attribute_lag(xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
    }
    let alive = Arc::clone(alive);
    let setup = Setup {
        host: name.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(move |host| Ok(alive.lock().contains(host))),
        view_age_max: Duration::ZERO,
        // A host that is dead waits for the backing, too.
        lag_max: match trouble {
            Trouble::Behind => Duration::from_millis(100),
            Trouble::None | Trouble::Lag | Trouble::Stall => Duration::ZERO,
        },
        unit_bytes: 100,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    let backing = LogBacking::open(ground.open(name), setup).expect("open");
    Host {
        // Little, so that indexes are sorted.
        backing: Arc::new(backing.with_memory(64 << 10)),
        ground,
        open: Vec::new(),
    }
}

/// Proves S-log-35.
#[test]
fn hosts_agree_on_what_the_order_of_changes_allows() {
    let worlds = seeds(100).map(|seed| run_world::<SimBacking>(seed, Trouble::None));
    let met: u64 = worlds.map(|ran| ran.met).sum();
    assert!(
        met > 100,
        "{met}: no changes were under way at the same time"
    );
}

/// Proves S-log-35, where the logs lie in lanes.
#[test]
fn hosts_agree_where_their_logs_lie_in_lanes() {
    for seed in seeds(60) {
        run_world::<SimLanes>(seed, Trouble::None);
    }
}

/// Proves S-log-39.
#[test]
fn hosts_agree_once_they_have_read_the_directories_anew() {
    let worlds = seeds(100).map(|seed| run_world::<SimBacking>(seed, Trouble::Lag));
    let outdated: u64 = worlds.map(|ran| ran.outdated).sum();
    assert!(outdated > 20, "{outdated}: the listings did not lag");
}

/// Proves S-log-72.
#[test]
fn hosts_agree_where_the_backing_is_a_moment_behind() {
    for seed in seeds(60) {
        run_world::<SimBacking>(seed, Trouble::Behind);
    }
}

/// Proves S-log-34.
#[test]
fn hosts_that_are_taken_for_dead_lose_nothing() {
    for seed in seeds(100) {
        run_world::<SimBacking>(seed, Trouble::Stall);
    }
}

/// What has happened in a world.
struct Ran {
    /// How often a host saw less than others because listings lag.
    outdated: u64,
    /// How often one was in the midst of a call when others did something.
    met: u64,
}

fn run_world<G: Ground>(seed: u64, trouble: Trouble) -> Ran {
    let mut world = World::<G>::new(seed, trouble);
    if world.lags() {
        (0..HOSTS.len()).for_each(|host| world.end_look(host));
    }
    for _ in 0..STEPS {
        world.step();
    }
    let ran = Ran {
        outdated: world.outdated,
        met: world.met,
    };
    world.end();
    ran
}
