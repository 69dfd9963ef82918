//! Random operations of three hosts on a few files, beside a model of what the order of changes promises; hosts are
//! killed at any call, come back, and flatten at any time.
//!
//! The model knows which changes each change comes after: those of its own host before it, and those of others that were
//! closed or synced before its host opened or synced the file. Each byte must be that of a change after which none
//! comes that has the byte, and all hosts, and the flat file, must agree on which.
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

mod common;

use common::{Ground, SimLanes, containers, read, read_unchecked};
use firn_backing::{Access, Backing, Errno, RenameFlags, SimBacking, suite};
use firn_log::{LogBacking, Setup};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const HOSTS: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 3] = ["x", "y", "z"];
const FILE_BYTES: u64 = 400;
const STEPS: u64 = 80;
/// Where listings lag, hosts read them anew after so many steps, and agree then.
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
    Cut(u64),
}

/// A change, and which of each host come before it.
#[derive(Clone, Debug)]
struct Op {
    host: usize,
    number: usize,
    after: [usize; 3],
    change: Change,
    /// Its host died in it: it was made or not.
    is_doubtful: bool,
}

impl Op {
    fn is_before(&self, other: &Self) -> bool {
        match self.host == other.host {
            true => self.number < other.number,
            false => self.number < other.after[self.host],
        }
    }

    /// What it makes of a byte; none if nothing, and none of none if the file may end before it.
    fn at(&self, offset: u64, mark: u8) -> Option<Option<u8>> {
        match &self.change {
            Change::Write(range) => range.contains(&offset).then_some(Some(mark)),
            Change::Cut(len) => (*len <= offset).then_some(None),
        }
    }
}

/// What is known of one file.
#[derive(Default)]
struct Model {
    ops: Vec<Op>,
    counts: [usize; 3],
    /// Of each host, the changes that were closed or synced.
    published: [usize; 3],
    /// What the next change of each host comes after.
    known: [[usize; 3]; 3],
}

impl Model {
    fn add(&mut self, host: usize, change: Change, is_doubtful: bool) {
        self.ops.push(Op {
            host,
            number: self.counts[host],
            after: self.known[host],
            change,
            is_doubtful,
        });
        self.counts[host] += 1;
    }

    fn next_mark(&self) -> u8 {
        mark(self.ops.len())
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
    fn candidates(&self, offset: u64) -> Vec<Option<u8>> {
        let numbered = self.ops.iter().enumerate();
        let here: Vec<(&Op, Option<u8>)> = numbered
            .filter_map(|(number, op)| Some((op, op.at(offset, mark(number))?)))
            .collect();
        let certain = || here.iter().filter(|(op, _)| !op.is_doubtful);
        let is_last = |op: &Op| !certain().any(|(other, _)| op.is_before(other));
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

    /// The file has at least so many bytes: those of writes after which, for certain, no shorter cut comes.
    fn least_len(&self) -> u64 {
        let ends = self.ops.iter().filter_map(|op| match &op.change {
            Change::Write(range) if !op.is_doubtful => Some((op, range.end)),
            _ => None,
        });
        let may_be_cut = |op: &Op, end: u64| {
            self.ops.iter().any(|other| match other.change {
                Change::Cut(len) => len < end && !other.is_before(op),
                Change::Write(_) => false,
            })
        };
        let stays = ends.filter(|(op, end)| !may_be_cut(op, *end));
        stays.map(|(_, end)| end).max().unwrap_or(0)
    }

    /// Whether a byte once had this value, or may have been a hole or cut off.
    fn knows(&self, offset: u64, byte: u8) -> bool {
        let made = |number: &usize| mark(*number) == byte;
        let number = (0..self.ops.len()).find(made);
        let has_byte = |number: usize| self.ops[number].at(offset, byte) == Some(Some(byte));
        byte == 0 || number.is_some_and(has_byte)
    }

    fn check(&self, bytes: &[u8]) -> Result<(), String> {
        let len = bytes.len() as u64;
        if len < self.least_len() {
            return Err(format!("{len} bytes, and at least {}", self.least_len()));
        }
        for offset in 0..FILE_BYTES + 200 {
            let found = bytes
                .get(offset as usize)
                .copied()
                .filter(|byte| *byte != 0);
            let candidates = self.candidates(offset);
            if !candidates.contains(&found) {
                return Err(format!(
                    "byte {offset} is {found:?}, not one of {candidates:?}"
                ));
            }
        }
        Ok(())
    }
}

fn mark(number: usize) -> u8 {
    u8::try_from(number + 1).expect("few changes")
}

type Logged<G> = LogBacking<<G as Ground>::Base>;
type File<G> = <Logged<G> as Backing>::File;

struct Host<G: Ground> {
    ground: G,
    backing: Logged<G>,
    /// With the inode number of the file.
    open: Vec<(u64, File<G>)>,
}

/// What is not as it should be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    /// Listings of directories lag.
    Lag,
    /// Hosts are taken for dead that are not.
    Stall,
}

struct World<G: Ground> {
    seed: u64,
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
        let hosts = HOSTS.map(|name| begin_host(&ground, name, &alive));
        Self {
            seed,
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
        let backing = &self.hosts[host].backing;
        let root = backing.root();
        let opened = match backing.lookup(&root, OsStr::new(name)) {
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
        };
        if let Some((ino, file)) = self.done(host, "open", opened) {
            self.names.insert(name, ino);
            let model = self.models.entry(ino).or_default();
            if looks {
                model.learn(host);
            }
            self.hosts[host].open.push((ino, file));
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
        if self.models[&ino].ops.len() > 200 {
            return;
        }
        let start = self.random.random_range(0..FILE_BYTES);
        let change = match self.random.random_ratio(1, 8) {
            true => Change::Cut(start),
            false => Change::Write(start..start + self.random.random_range(1..150)),
        };
        self.note(format!("{} makes {change:?} to {ino}", HOSTS[host]));
        let mark = self.models[&ino].next_mark();
        let Host { backing, open, .. } = &self.hosts[host];
        let file = &open[opened].1;
        let outcome = match &change {
            Change::Cut(len) => backing.set_len(file, *len),
            Change::Write(range) => {
                let data = vec![mark; (range.end - range.start) as usize];
                let written = backing.write_at(file, &[IoSlice::new(&data)], range.start);
                written.map(|count| assert_eq!(count, data.len()))
            }
        };
        let is_doubtful = self.done(host, "a change", outcome).is_none();
        let model = self.models.get_mut(&ino).expect("known");
        model.add(host, change, is_doubtful);
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
        self.hosts[host] = begin_host(&self.ground, name, &self.alive);
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
        let bytes = match read_unchecked(&self.hosts[host].backing, name) {
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
        self.outdated += u64::from(model.check(&bytes).is_err());
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
                && let Err(error) = model.check(&bytes)
            {
                self.fail(&format!("{name} ({ino}): {error}"));
            }
        }
    }

    fn read(&self, host: usize, name: &str) -> Option<Vec<u8>> {
        match read(&self.hosts[host].backing, name) {
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
        // What a host that died left is ended by whoever opens it.
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
        let orphans = self.hosts[0].backing.find_orphans().expect("find");
        // Who removes a file and has not seen its logs does not say that they may go.
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

fn begin_host<G: Ground>(ground: &G, name: &str, alive: &Arc<Mutex<HashSet<String>>>) -> Host<G> {
    let ground = ground.another_process();
    let alive = Arc::clone(alive);
    let setup = Setup {
        host: name.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(move |host| Ok(alive.lock().contains(host))),
        patience: Duration::ZERO,
        unit_bytes: 100,
        flattens_closed: true,
        flattens_read: false,
    };
    let backing = LogBacking::open(ground.open(name), setup).expect("open");
    Host {
        // Little, so that indexes are sorted.
        backing: backing.with_memory(64 << 10),
        ground,
        open: Vec::new(),
    }
}

/// A file with something left to do was forgotten once another host had flattened it. Opened and written again, it was
/// flattened under its writer, who was told ENOENT.
#[test]
fn regression_a_file_that_is_written_again_is_not_flattened_by_its_former_self() {
    run_world::<SimBacking>(5_003_170, Trouble::None);
}

/// Proves S-log-35.
#[test]
fn hosts_agree_on_what_the_order_of_changes_allows() {
    for seed in seeds(100) {
        run_world::<SimBacking>(seed, Trouble::None);
    }
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
    let outdated: u64 = worlds.sum();
    assert!(outdated > 20, "{outdated}: the listings did not lag");
}

/// Proves S-log-34.
#[test]
fn hosts_that_are_taken_for_dead_lose_nothing() {
    for seed in seeds(100) {
        run_world::<SimBacking>(seed, Trouble::Stall);
    }
}

/// How often a host saw less than others because listings lag.
fn run_world<G: Ground>(seed: u64, trouble: Trouble) -> u64 {
    let mut world = World::<G>::new(seed, trouble);
    if world.lags() {
        (0..HOSTS.len()).for_each(|host| world.end_look(host));
    }
    for _ in 0..STEPS {
        world.step();
    }
    let outdated = world.outdated;
    world.end();
    outdated
}
