//! Tests that a call of the backing that never returns blocks only its own file.

use crate::common;

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::world::World;
use firn_backing::{Caller, Errno, RenameFlags, SetTime};
use firn_engine::{
    Closing, Engine, HandleId, InodeId, LaneIndex, LaneLimits, NextStep, ROOT, SetAttr, Written,
};
use firn_sim::SimBacking;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
/// Timeout of the tests: only a call that hangs takes this long.
const HANG_LIMIT: Duration = Duration::from_secs(60);
const RDWR: i32 = 2;

/// An open file with pending data. It is the only file in its directory.
#[derive(Clone, Copy)]
struct Place {
    dir: InodeId,
    inode: InodeId,
    handle: HandleId,
}

fn place(engine: &Engine<SimBacking>, dir: &str) -> Place {
    let dir = engine
        .namespace
        .mkdir(&CALLER, ROOT, OsStr::new(dir), 0o755)
        .expect("mkdir")
        .inode;
    let (entry, opened) = engine
        .create(&CALLER, dir, OsStr::new("file"), 0o644, RDWR)
        .expect("create");
    let handle = opened.handle;
    assert_eq!(
        engine.write(handle, 0, b"pending", None),
        Ok(Written::Bytes(7))
    );
    Place {
        dir,
        inode: entry.inode,
        handle,
    }
}

fn attributes() -> SetAttr {
    SetAttr {
        mode: None,
        uid: None,
        gid: None,
        size: None,
        atime: SetTime::Keep,
        mtime: SetTime::Keep,
    }
}

fn drain(engine: &Engine<SimBacking>) {
    while let NextStep::Job(job) = engine.drainer.pick(LaneIndex::FIRST, LaneLimits::NONE) {
        let outcome = job.execute(engine);
        engine.drainer.complete(job, outcome);
    }
}

/// Ignores the result of a request that hung, which these tests do not check.
fn ignore<T>(_: Result<T, Errno>) {}

type Request = fn(&Engine<SimBacking>, Place);

/// Returns requests: name of the request, name of the call of the backing that hangs in it, and the request itself.
fn requests() -> Vec<(&'static str, &'static str, Request)> {
    vec![
        ("lookup", "lookup", |engine, place| {
            ignore(engine.namespace.lookup(place.dir, OsStr::new("file")))
        }),
        ("stat", "attr", |engine, place| {
            ignore(engine.namespace.attr(place.inode, None))
        }),
        ("open", "attr", |engine, place| {
            ignore(engine.open(place.inode, 0))
        }),
        ("create", "create", |engine, place| {
            ignore(engine.create(&CALLER, place.dir, OsStr::new("new"), 0o644, RDWR));
        }),
        ("mkdir", "mkdir", |engine, place| {
            ignore(
                engine
                    .namespace
                    .mkdir(&CALLER, place.dir, OsStr::new("new"), 0o755),
            )
        }),
        ("link", "link", |engine, place| {
            ignore(
                engine
                    .namespace
                    .link(place.inode, place.dir, OsStr::new("second")),
            )
        }),
        ("unlink", "unlink", |engine, place| {
            ignore(engine.namespace.unlink(place.dir, OsStr::new("file")))
        }),
        ("rename", "rename", |engine, place| {
            let none = RenameFlags::empty();
            ignore(engine.namespace.rename(
                place.dir,
                OsStr::new("file"),
                place.dir,
                OsStr::new("moved"),
                none,
            ));
        }),
        ("ftruncate", "set_len", |engine, place| {
            ignore(engine.namespace.set_attr(
                place.inode,
                SetAttr {
                    size: Some(3),
                    ..attributes()
                },
                None,
            ));
        }),
        ("ftruncate to more", "set_len", |engine, place| {
            ignore(engine.namespace.set_attr(
                place.inode,
                SetAttr {
                    size: Some(1 << 20),
                    ..attributes()
                },
                None,
            ));
        }),
        ("open with O_TRUNC", "set_len", |engine, place| {
            ignore(engine.open(place.inode, 0o1002))
        }),
        ("utimens", "set_times", |engine, place| {
            ignore(engine.namespace.set_attr(
                place.inode,
                SetAttr {
                    mtime: SetTime::Now,
                    ..attributes()
                },
                None,
            ));
        }),
        ("chmod", "set_mode", |engine, place| {
            ignore(engine.namespace.set_attr(
                place.inode,
                SetAttr {
                    mode: Some(0o600),
                    ..attributes()
                },
                None,
            ));
        }),
        ("fallocate", "write_at", |engine, place| {
            ignore(engine.allocate(place.handle, 0, 0, 1 << 16))
        }),
        ("fallocate", "allocate", |engine, place| {
            ignore(engine.allocate(place.handle, 0, 0, 1 << 16))
        }),
        ("copy", "copy_range", |engine, place| {
            ignore(engine.copy_range(place.handle, 0, place.handle, 100, 7));
        }),
        ("read", "read_at", |engine, place| {
            ignore(engine.read(place.handle, 0, &mut [0; 100]))
        }),
        ("seek", "seek", |engine, place| {
            ignore(engine.seek(place.handle, 0, firn_backing::Seek::Data));
        }),
        ("fsync", "sync", |engine, place| {
            ignore(engine.sync_file(place.handle, false))
        }),
        ("readdir", "read_dir", |engine, place| {
            let dir = engine.namespace.open_dir(place.dir).expect("opendir");
            ignore(engine.namespace.read_dir(dir, 0, &mut |_| true));
        }),
        ("drain", "write_at", |engine, _| {
            engine.durability.drain_tree(b"hung");
            drain(engine);
        }),
        ("end of a drain", "set_times", |engine, _| {
            engine.durability.drain_tree(b"hung");
            drain(engine);
        }),
    ]
}

/// Makes all calls that a program may make for a file, and those of `firn status`.
fn everything_else(engine: &Engine<SimBacking>, other: Place) {
    let name = OsStr::new("file");
    assert_eq!(
        engine.write(other.handle, 7, b" more", None),
        Ok(Written::Bytes(5))
    );
    let mut bytes = [0; 12];
    assert_eq!(engine.read(other.handle, 0, &mut bytes), Ok(12));
    assert_eq!(&bytes, b"pending more");
    assert_eq!(
        engine.namespace.attr(other.inode, None).expect("stat").size,
        12
    );
    assert_eq!(
        engine
            .namespace
            .lookup(other.dir, name)
            .expect("lookup")
            .inode,
        other.inode
    );
    let opened = engine.open(other.inode, RDWR).expect("open");
    engine.flush(opened.handle, Closing::Called, Box::new(|_| {}));
    engine.release(opened.handle);
    // The first write of a file assigns a file id.
    let (_, made) = engine
        .create(&CALLER, other.dir, OsStr::new("made"), 0o644, RDWR)
        .expect("create");
    assert_eq!(
        engine.write(made.handle, 0, b"new", None),
        Ok(Written::Bytes(3))
    );
    let none = RenameFlags::empty();
    engine
        .namespace
        .rename(
            other.dir,
            OsStr::new("made"),
            other.dir,
            OsStr::new("moved"),
            none,
        )
        .expect("rename");
    engine
        .namespace
        .unlink(other.dir, OsStr::new("moved"))
        .expect("unlink");
    engine.release(made.handle);
    engine
        .namespace
        .set_attr(
            other.inode,
            SetAttr {
                size: Some(5),
                ..attributes()
            },
            None,
        )
        .expect("truncate");
    let dir = engine.namespace.open_dir(other.dir).expect("opendir");
    engine
        .namespace
        .read_dir(dir, 0, &mut |_| true)
        .expect("readdir");
    engine.namespace.release_dir(dir);
    let (tell, told) = mpsc::channel();
    engine.fsync(
        other.handle,
        Box::new(move |result| tell.send(result).expect("somebody waits")),
    );
    drain(engine);
    told.recv_timeout(HANG_LIMIT)
        .expect("drained")
        .expect("drained");
    engine.sync_file(other.handle, false).expect("fsync");
    let asked = Instant::now();
    let status = engine.figures();
    println!(
        "    status of {} held bytes after {:?}",
        status.held_bytes,
        asked.elapsed()
    );
}

#[test]
fn regression_a_call_that_hangs_stops_nothing_but_its_file() {
    for (request, call, run) in requests() {
        let world = World::new();
        let engine = &world.engine;
        let hung = place(engine, "hung");
        let other = place(engine, "other");
        if matches!(request, "read" | "seek" | "copy" | "end of a drain") {
            // After a gap, so that these requests also need the backing.
            engine
                .write(hung.handle, 1 << 15, b"far", None)
                .expect("write");
        }
        println!("{request} hangs in {call}");
        let hang = world.backing.hang(call);
        let (tell, ended) = mpsc::channel();
        let theirs = Arc::clone(engine);
        let stuck = std::thread::spawn(move || {
            run(&theirs, hung);
            let _ = tell.send("request");
        });
        await_call(&hang, request);
        let (tell, done) = mpsc::channel();
        let ours = Arc::clone(engine);
        let beside = std::thread::spawn(move || {
            everything_else(&ours, other);
            let _ = tell.send(());
        });
        done.recv_timeout(HANG_LIMIT)
            .unwrap_or_else(|error| panic!("{request} that hangs in {call} stops others: {error}"));
        beside.join().expect("what is done beside");
        assert!(ended.try_recv().is_err(), "{request}: the call still hangs");
        hang.release();
        stuck.join().expect("the request that hung");
    }
}

fn await_call(hang: &firn_sim::Hang, request: &str) {
    let deadline = Instant::now() + HANG_LIMIT;
    while !hang.is_reached() {
        assert!(
            Instant::now() < deadline,
            "{request} never comes to the call"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_file_that_waits_for_a_truncation_is_written_and_read() {
    let world = World::new();
    let engine = &world.engine;
    let file = place(engine, "hung");
    let hang = world.backing.hang("set_len");
    let theirs = Arc::clone(engine);
    let cut = std::thread::spawn(move || {
        theirs
            .namespace
            .set_attr(
                file.inode,
                SetAttr {
                    size: Some(3),
                    ..attributes()
                },
                None,
            )
            .expect("truncate")
    });
    await_call(&hang, "ftruncate");
    // This write is later than the truncation, although the truncation has not reached the backing yet.
    assert_eq!(
        engine.write(file.handle, 7, b"late", None),
        Ok(Written::Bytes(4))
    );
    assert_eq!(
        engine.write(file.handle, 0, b"P", None),
        Ok(Written::Bytes(1))
    );
    hang.release();
    assert_eq!(cut.join().expect("truncate").size, 11);
    let mut bytes = [9; 11];
    assert_eq!(engine.read(file.handle, 0, &mut bytes), Ok(11));
    assert_eq!(&bytes, b"Pen\0\0\0\0late");
    engine.durability.drain_tree(b"");
    drain(engine);
    assert_eq!(world.backing_tree()["hung/file"], b"Pen\0\0\0\0late");
}
