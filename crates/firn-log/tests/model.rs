//! Random operations of three hosts on a few files, beside a model of what the order of changes promises; hosts are
//! killed at any call, come back, and flatten at any time.
//!
//! The model knows which changes each change comes after: those of its own host before it, and those of others that were
//! closed or synced before its host opened or synced the file. Each byte must be that of a change after which none
//! comes that has the byte, and all hosts, and the flat file, must agree on which.
//!
//! `FIRN_OPS` asks for more operations, `FIRN_SEED` for other seeds.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

mod common;

use common::{Ground, SimLanes, containers, read};
use firn_backing::{Access, Backing, Errno, RenameFlags, SimBacking, suite};
use firn_log::{LogBacking, Setup};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const HOSTS: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 3] = ["x", "y", "z"];
const FILE_BYTES: u64 = 400;
const STEPS: u64 = 80;

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
    fn candidates(&self, offset: u64) -> HashSet<Option<u8>> {
        let numbered = self.ops.iter().enumerate();
        let here: Vec<(&Op, Option<u8>)> = numbered
            .filter_map(|(number, op)| Some((op, op.at(offset, mark(number))?)))
            .collect();
        let certain = || here.iter().filter(|(op, _)| !op.is_doubtful);
        let is_last = |op: &Op| !certain().any(|(other, _)| op.is_before(other));
        let mut values: HashSet<Option<u8>> = here
            .iter()
            .filter(|(op, _)| is_last(op))
            .map(|(_, value)| *value)
            .collect();
        if certain().next().is_none() {
            values.insert(None);
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

struct World<G: Ground> {
    seed: u64,
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
    fn new(seed: u64) -> Self {
        let ground = G::new();
        let alive: HashSet<String> = HOSTS.map(String::from).into();
        let alive = Arc::new(Mutex::new(alive));
        let hosts = HOSTS.map(|name| begin_host(&ground, name, &alive));
        Self {
            seed,
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

    fn step(&mut self) {
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
        self.check();
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

    fn open(&mut self, host: usize) {
        let name = self.name();
        self.note(format!("{} opens {name}", HOSTS[host]));
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
            self.models.entry(ino).or_default().learn(host);
            self.hosts[host].open.push((ino, file));
        }
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
        let Host { backing, open, .. } = &self.hosts[host];
        let (ino, file) = &open[opened];
        let (ino, outcome) = (*ino, backing.sync(file, false));
        self.note(format!("{} syncs {ino}", HOSTS[host]));
        if self.done(host, "sync", outcome).is_some() {
            let model = self.models.get_mut(&ino).expect("known");
            model.publish(host);
            model.learn(host);
        }
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
        let (from, to) = (self.name(), self.name());
        self.note(format!("{} renames {from} to {to}", HOSTS[host]));
        if from != to {
            self.close_elsewhere(host, to);
        }
        let backing = &self.hosts[host].backing;
        let root = backing.root();
        let (from_name, to_name) = (OsStr::new(from), OsStr::new(to));
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
        self.end_naming(host, Ok(()));
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
            host.open.clear();
        }
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
        assert!(orphans.lost.is_empty(), "{orphans:?}");
        let left = containers(&self.plain);
        if !left.is_empty() {
            self.fail(&format!("left: {left:?}"));
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
    run_world::<SimBacking>(5_003_170);
}

/// Proves S-log-35.
#[test]
fn hosts_agree_on_what_the_order_of_changes_allows() {
    for seed in seeds(100) {
        run_world::<SimBacking>(seed);
    }
}

/// Proves S-log-35, where the logs lie in lanes.
#[test]
fn hosts_agree_where_their_logs_lie_in_lanes() {
    for seed in seeds(60) {
        run_world::<SimLanes>(seed);
    }
}

fn run_world<G: Ground>(seed: u64) {
    let mut world = World::<G>::new(seed);
    for _ in 0..STEPS {
        world.step();
    }
    world.end();
}
