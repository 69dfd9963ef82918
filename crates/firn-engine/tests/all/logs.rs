//! Tests of an engine over logs, to which another host also writes.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::time::Duration;

use firn_arena::{Arena, Identity};
use firn_backing::{Access, Backing, Caller, Errno, Files, Names, SetTime, Volume};
use firn_engine::{
    Closing, DrainPolicy, Engine, EngineOptions, Executor, HandleId, LaneIndex, LaneLimits,
    NextStep, ROOT, SetAttr, Written,
};
use firn_format::geometry::Geometry;
use firn_log::{LogBacking, Setup, WhenClosed};
use firn_sim::{Fault, SimBacking};

const CHUNK: u64 = 128 << 10;
const O_RDWR: i32 = 2;
const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};

type Logged = LogBacking<SimBacking>;

/// Opens the log layer of a host. For it, all hosts but `a` are alive.
fn logged(disk: &SimBacking, host: &str) -> Logged {
    let setup = Setup {
        host: host.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(|host| Ok(host != "a")),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 1 << 20,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    LogBacking::open(disk.clone(), setup).expect("open")
}

/// An executor that drains only while a caller waits for a drain.
struct Steps(Weak<Engine<Logged>>);

impl Executor for Steps {
    fn wake(&self, _: LaneIndex) {}

    fn wait_for(&self, outcome: &Receiver<Result<(), Errno>>) -> Result<(), Errno> {
        let engine = self.0.upgrade().expect("its engine waits");
        loop {
            if let Ok(result) = outcome.try_recv() {
                return result;
            }
            assert!(drain_step(&engine), "nothing to drain, and not drained");
        }
    }
}

fn drain_step(engine: &Engine<Logged>) -> bool {
    engine
        .drainer
        .lanes()
        .any(|lane| match engine.drainer.pick(lane, LaneLimits::NONE) {
            NextStep::Job(job) => {
                let outcome = job.execute(engine);
                engine.drainer.complete(job, outcome);
                true
            }
            NextStep::Idle { .. } => false,
        })
}

fn options() -> EngineOptions {
    EngineOptions {
        drain: DrainPolicy::Demand,
        ..EngineOptions::new(CHUNK)
    }
}

fn run(engine: &Arc<Engine<Logged>>) {
    engine
        .drainer
        .set_executor(Arc::new(Steps(Arc::downgrade(engine))));
}

fn begin(disk: &SimBacking, arena: &Path) -> Arc<Engine<Logged>> {
    let identity = Identity {
        backing: "/sim".into(),
        dev: 1,
        ino: 1,
    };
    let geometry = Geometry::with_spill(4 * CHUNK, CHUNK, 0).expect("a valid geometry");
    let arena =
        Arena::create_with_spill(arena, geometry, &identity, &arena.with_extension("spill"));
    let engine = Engine::begin(logged(disk, "a"), arena.expect("an arena"), options());
    let engine = engine.expect("an engine");
    run(&engine);
    engine
}

fn write(engine: &Engine<Logged>, handle: HandleId, offset: u64, bytes: &[u8]) {
    let written = engine.write(handle, offset, bytes, None).expect("a write");
    assert!(matches!(written, Written::Bytes(count) if count == bytes.len()));
}

fn set_len(size: u64) -> SetAttr {
    SetAttr {
        mode: None,
        uid: None,
        gid: None,
        size: Some(size),
        atime: SetTime::Keep,
        mtime: SetTime::Keep,
    }
}

fn bytes_of(host: &Logged, name: &str) -> Vec<u8> {
    let (inode, attr) = host.lookup(&host.root(), OsStr::new(name)).expect("a file");
    let file = host.open(&inode, Access::Read).expect("open");
    let mut bytes = vec![0; attr.size as usize];
    assert_eq!(host.read_at(&file, &mut bytes, 0), Ok(bytes.len()));
    bytes
}

/// A host truncates a file that has bytes in its logs and in its arena, and dies at any call of the backing. Another
/// host writes, then the first host recovers. The truncation has happened completely or not at all, and the other
/// host's bytes are there.
///
/// Proves S-log-65.
#[test]
fn a_cut_in_which_a_host_dies_takes_nothing_that_others_write_before_it_is_back() {
    const LOGGED: usize = 4000;
    const HELD: usize = 4000;
    const LATER: u64 = 20_000;
    let mut outcomes = [0, 0];
    for calls in 1.. {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let arena = dir.path().join("arena");
        let disk = SimBacking::new();
        let disk_of_a = disk.another_process();
        let engine = begin(&disk_of_a, &arena);
        let name = OsStr::new("file");
        let made = engine.create(&CALLER, ROOT, name, 0o644, O_RDWR);
        let (entry, opened) = made.expect("create");
        write(&engine, opened.handle, 0, &[1; LOGGED]);
        engine.durability.drain_tree(b"");
        while drain_step(&engine) {}
        write(&engine, opened.handle, LOGGED as u64, &[2; HELD]);

        let crashed = arena.with_extension("crashed");
        let at = disk_of_a.steps() + calls;
        let (from, to) = (arena.clone(), crashed.clone());
        let mut is_dead = false;
        disk_of_a.set_plan(move |_, step| {
            if !is_dead && step >= at {
                std::fs::copy(&from, &to).expect("the arena is copied");
                is_dead = true;
            }
            is_dead.then_some(Fault::Crash)
        });
        let outcome = engine.namespace.set_attr(entry.inode, set_len(0), None);
        let has_died = disk_of_a.is_dead();
        assert_eq!(outcome.is_err(), has_died);
        drop(engine);
        if !has_died {
            break;
        }

        let other = logged(&disk.another_process(), "b");
        let (inode, _) = other.lookup(&other.root(), name).expect("the file");
        let file = other.open(&inode, Access::ReadWrite).expect("open");
        let written = other.write_at(&file, &[IoSlice::new(&[3; 4000])], LATER);
        assert_eq!(written, Ok(4000));
        other.sync(&file, false).expect("sync");

        let (arena, stored, damage) = Arena::attach(&crashed).expect("the arena attaches");
        assert_eq!(damage, []);
        let back = logged(&disk.another_process(), "a");
        let attached = Engine::attach(back, arena, &stored, options());
        let (engine, recovered) = attached.expect("the engine attaches");
        assert!(recovered.lost.is_empty());
        run(&engine);
        engine.durability.drain_tree(b"");
        while drain_step(&engine) {}
        assert_eq!(engine.figures().held_bytes, 0);

        let bytes = bytes_of(&logged(&disk.another_process(), "c"), "file");
        let (own, rest) = bytes.split_at(LOGGED + HELD);
        assert_eq!(rest[rest.len() - 4000..], [3; 4000], "died at call {calls}");
        let old = [vec![1; LOGGED], vec![2; HELD]].concat();
        let is_cut = own.iter().all(|byte| *byte == 0);
        assert!(
            is_cut || own == old,
            "died at call {calls}: neither old nor new"
        );
        outcomes[usize::from(is_cut)] += 1;
        let _ = (opened, Closing::Called);
    }
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
}
