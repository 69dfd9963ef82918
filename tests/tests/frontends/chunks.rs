//! Chunk lists: files read out of the memory and the spill file of a mount, by its lists.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_protocol::{ChunkList, Place, Reply, Request};
use firn_tests::c::{Installed, Link};
use firn_tests::chunks::{Control, Files, bytes_in};
use firn_tests::command::run;
use firn_tests::faultfs::FaultFs;
use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::random::bytes;
use firn_tests::stop::StopAtEnd;
use firn_tests::{FirnMount, Sandbox, wait_until};

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// Nothing passes through: the kernel tells firnd of a reader's close after close(2) has returned,
/// and a writer that comes before that goes the reader's way, past the arena.
const DEMAND: &str = "memory=32M,chunk-size=1M,drain=demand,passthrough=off";

/// Nothing drains unasked: memory for 16 MiB, and more in the spill file.
fn spilling(sandbox: &Sandbox) -> String {
    let dir = sandbox.mkdir("local");
    format!(
        "arena-size=16M,chunk-size=1M,drain=demand,spill={},spill-size=64M",
        dir.display()
    )
}

/// Four files of 6 MiB and more: some of them spill.
fn write_ranks(mount: &FirnMount<'_>) -> Vec<(PathBuf, Vec<u8>)> {
    let files: Vec<_> = (0..4)
        .map(|n| {
            (
                mount.join(format!("rank{n}")),
                bytes(n + 1, 6 * MIB + 1000 * n as usize),
            )
        })
        .collect();
    for (path, data) in &files {
        fs::write(path, data).expect("write");
    }
    wait_until("memory is below the lower threshold", LIMIT, || {
        mount.status().arena_used_bytes <= 13 << 20
    });
    files
}

fn drain(sandbox: &Sandbox, path: &Path) {
    sandbox
        .run([OsStr::new("drain"), OsStr::new("--wait"), path.as_os_str()])
        .ok();
}

fn evict(sandbox: &Sandbox, path: &Path) -> (u64, u64) {
    let told = sandbox
        .run([OsStr::new("evict"), OsStr::new("--json"), path.as_os_str()])
        .ok()
        .json();
    let bytes = |key: &str| told[key].as_u64().expect("a number");
    (bytes("freed_bytes"), bytes("held_bytes"))
}

fn held(list: &ChunkList) -> u64 {
    bytes_in(list, Place::Memory) + bytes_in(list, Place::Spill)
}

/// FNV-1a, 64 bits, as tests/c/list.c has it.
fn sum(bytes: &[u8]) -> String {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Writes, overwrites and removes files of its own until it is told to stop.
fn churn(mount: &Path, number: u64, stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let path = mount.join(format!("other{number}"));
        fs::write(&path, bytes(rounds, 2 * MIB + 77)).expect("write another file");
        open_rw(&path)
            .write_all_at(&bytes(rounds + 1, 5000), 1000)
            .expect("overwrite it");
        assert_eq!(read(&path).len(), 2 * MIB + 77);
        fs::remove_file(&path).expect("remove it");
        rounds += 1;
    }
    rounds
}

/// Proves S-chunks-1, S-chunks-3.
#[test]
fn lists_give_the_bytes_of_the_mount_while_other_files_are_written() {
    let sandbox = Sandbox::new("chunks");
    let mount = FirnMount::new(&sandbox, &spilling(&sandbox));
    let files = write_ranks(&mount);
    let mut control = Control::new(&sandbox);
    let region = control.region();
    assert_eq!(
        (region.bytes, region.chunk_bytes, region.page_bytes),
        (16 << 20, 1 << 20, 4096)
    );
    assert_eq!(region.path, sandbox.arena().to_str().expect("utf-8"));
    let places = Files::of(&region);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = StopAtEnd(&stop);
        let writers = [0, 1].map(|n| {
            scope.spawn({
                let mount = mount.path().to_owned();
                let stop = &stop;
                move || churn(&mount, n, stop)
            })
        });
        let mut memory = 0;
        let mut spill = 0;
        for _ in 0..10 {
            for (path, data) in &files {
                let name = path.file_name().and_then(OsStr::to_str).expect("utf-8");
                let list = control.list(name).expect("a list");
                memory += bytes_in(&list, Place::Memory);
                spill += bytes_in(&list, Place::Spill);
                assert_eq!(held(&list), data.len() as u64, "{list:?}");
                assert_same_bytes("by the list", &places.read(&list, path), data);
                assert!(!control.changed(&list), "{name} is written by nobody");
                control.release(&list);
                assert_same_bytes("by the mount", &read(path), data);
            }
        }
        assert!(
            memory > 0 && spill > 0,
            "{memory} bytes in memory, {spill} spilled"
        );
        drop(ended);
        for writer in writers {
            assert!(
                writer.join().expect("a writer") > 0,
                "nothing was written meanwhile"
            );
        }
    });
    assert_eq!(mount.status().chunk_lists, 0);
}

/// Proves S-chunks-1, S-chunks-2: whatever becomes of a file, a list has what it was.
#[test]
fn what_a_list_names_outlives_the_file() {
    let sandbox = Sandbox::new("chunkslive");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let path = mount.join("f");
    let behind = mount.backing().join("f");
    let before = bytes(1, 5 * MIB + 77);
    fs::write(&path, &before).expect("write");
    let mut control = Control::new(&sandbox);
    let places = Files::of(&control.region());
    let list = control.list("f").expect("a list");
    assert_eq!(bytes_in(&list, Place::Memory), before.len() as u64);
    let same = |what: &str| assert_same_bytes(what, &places.read(&list, &behind), &before);
    same("at first");
    assert!(!control.changed(&list));

    drain(&sandbox, &path);
    assert!(!control.changed(&list), "a drain changes no byte");
    let file = open_rw(&path);
    file.write_all_at(&bytes(2, 3 * MIB), 100_000)
        .expect("overwrite");
    same("after an overwrite");
    assert!(control.changed(&list));
    let second = control.list("f").expect("a second list");
    assert!(!control.changed(&second), "its own changes only");
    let after = read(&path);
    file.write_all_at(&bytes(3, 1000), 0)
        .expect("overwrite where it is pending");
    assert_same_bytes("the second list", &places.read(&second, &behind), &after);
    file.write_all_at(&bytes(3, 1000), before.len() as u64)
        .expect("append");
    file.set_len(1000).expect("truncate");
    file.set_len(9 << 20).expect("extend");
    same("after truncations");
    drain(&sandbox, &path);
    same("after a drain");
    drop(file);
    fs::remove_file(&path).expect("unlink");
    same("after the removal");
    // All other memory is written to, so that room which was given away wrongly would show.
    let filler = open_rw(&mount.join("filler"));
    let full = (0..64)
        .map(|n| filler.write_all_at(&bytes(n, MIB), n << 20))
        .find_map(Result::err);
    assert_eq!(
        full.and_then(|error| error.raw_os_error()),
        Some(libc::ENOSPC)
    );
    same("when all other memory was used");
    assert_same_bytes("the second list", &places.read(&second, &behind), &after);
    assert!(control.changed(&list));
}

/// Proves S-chunks-4: evictions and the spill thread leave alone what a list names.
#[test]
fn nothing_moves_or_leaves_while_a_list_is_held() {
    let sandbox = Sandbox::new("chunksmove");
    let mount = FirnMount::new(&sandbox, &spilling(&sandbox));
    let path = mount.join("first");
    let data = bytes(1, 5 * MIB);
    fs::write(&path, &data).expect("write");
    drain(&sandbox, &path);
    let mut control = Control::new(&sandbox);
    let places = Files::of(&control.region());
    let list = control.list("first").expect("a list");
    assert_eq!(bytes_in(&list, Place::Memory), data.len() as u64);
    assert_eq!(evict(&sandbox, &path), (0, data.len() as u64));
    // It was sealed first, so it would move or go first.
    let files = write_ranks(&mount);
    assert!(mount.status().spill.expect("a spill file").moved_bytes > 0);
    let again = control.list("first").expect("a list");
    assert_eq!(again.pieces, list.pieces);
    assert_same_bytes("held", &places.read(&list, &path), &data);
    control.release(&again);
    control.release(&list);
    assert_eq!(evict(&sandbox, &path), (data.len() as u64, 0));
    let list = control.list("first").expect("a list");
    assert_eq!(
        (held(&list), bytes_in(&list, Place::Backing)),
        (0, data.len() as u64)
    );

    // The same for what is not drained: it moves once it is let go.
    let in_memory = |control: &mut Control| {
        let list = control.list("rank3").expect("a list");
        let bytes = bytes_in(&list, Place::Memory);
        (list, bytes)
    };
    let (kept, before) = in_memory(&mut control);
    assert!(before > 0, "{kept:?}");
    fs::write(mount.join("more"), bytes(9, 12 * MIB)).expect("write");
    assert_same_bytes("held", &places.read(&kept, &files[3].0), &files[3].1);
    assert_eq!(in_memory(&mut control).0.pieces, kept.pieces);
    drop(control);
    let mut control = Control::new(&sandbox);
    wait_until("what is held no more moves", LIMIT, || {
        let (list, now) = in_memory(&mut control);
        control.release(&list);
        fs::write(mount.join("more"), bytes(10, 12 * MIB)).expect("write");
        now < before
    });
}

/// Proves S-chunks-6. All of memory is held: writers are told, and do not wait for a list to end.
#[test]
fn a_memory_full_of_lists_is_enospc_and_no_hang() {
    let sandbox = Sandbox::new("chunksfull");
    for options in [
        DEMAND.to_owned(),
        spilling(&sandbox),
        "arena-size=16M,chunk-size=1M,close=held".into(),
    ] {
        let mount = FirnMount::new(&sandbox, &options);
        let mut control = Control::new(&sandbox);
        let taken = bytes(1, MIB);
        let mut number = 0;
        let errno = loop {
            let name = format!("f{number}");
            // Held before it can move or be drained away: each file is listed as soon as it is there.
            let file = open_rw(&mount.join(&name));
            let written = file.write_all_at(&taken, 0);
            if held(&control.list(&name).expect("a list")) > 0 || written.is_ok() {
                number += 1;
            }
            if let Err(error) = written {
                break error.raw_os_error();
            }
            assert!(number < 1000, "{options}: memory is never full");
        };
        assert_eq!(errno, Some(libc::ENOSPC), "{options}");
        drop(control);
        wait_until("the lists end", LIMIT, || mount.status().chunk_lists == 0);
        drain(&sandbox, mount.path());
        fs::write(mount.join("after"), &taken).expect("there is room again");
        mount.umount();
        fs::remove_dir_all(sandbox.join("backing")).expect("remove");
        sandbox.mkdir("backing");
    }
}

/// Proves S-chunks-3.
#[test]
fn memory_backing_and_holes_are_told_apart() {
    let sandbox = Sandbox::new("chunksplaces");
    let old = bytes(1, 300_000);
    fs::write(sandbox.join("backing/old"), &old).expect("write");
    let mount = FirnMount::new(&sandbox, DEMAND);
    let mut control = Control::new(&sandbox);
    let places = Files::of(&control.region());
    let mut shape = |name: &str| {
        let list = control.list(name).expect("a list");
        let behind = mount.backing().join(name);
        assert_same_bytes(name, &places.read(&list, &behind), &read(&mount.join(name)));
        list.pieces
            .iter()
            .map(|piece| (piece.place, piece.bytes))
            .collect::<Vec<_>>()
    };
    assert_eq!(shape("old"), [(Place::Backing, 300_000)]);
    let file = open_rw(&mount.join("old"));
    file.write_all_at(&bytes(2, 1000), 100_000).expect("write");
    let both = [
        (Place::Backing, 100_000),
        (Place::Memory, 1000),
        (Place::Backing, 199_000),
    ];
    assert_eq!(shape("old"), both);
    file.write_all_at(&bytes(2, 1000), 400_000).expect("write");
    assert_eq!(
        shape("old")[3..],
        [(Place::Hole, 100_000), (Place::Memory, 1000)]
    );
    let file = open_rw(&mount.join("new"));
    assert_eq!(shape("new"), []);
    file.write_all_at(&bytes(3, 1000), 1 << 20).expect("write");
    assert_eq!(
        shape("new"),
        [(Place::Hole, 1 << 20), (Place::Memory, 1000)]
    );
    file.set_len(2 << 20).expect("extend");
    let end = (Place::Backing, MIB as u64 - 1000);
    assert_eq!(
        shape("new"),
        [(Place::Backing, 1 << 20), (Place::Memory, 1000), end]
    );
    fs::create_dir(mount.join("dir")).expect("mkdir");
    std::os::unix::fs::symlink("old", mount.join("link")).expect("symlink");
    let expected = [
        ("dir", libc::EISDIR),
        ("", libc::EISDIR),
        ("link", libc::EINVAL),
        ("missing", libc::ENOENT),
        ("old/x", libc::ENOTDIR),
        ("../backing/old", libc::ENOENT),
        ("./old", libc::ENOENT),
    ];
    for (path, errno) in expected {
        assert_eq!(control.list(path).expect_err(path), errno, "{path}");
    }
}

/// Proves S-chunks-2: a file that the kernel may be writing by itself counts as changed.
#[test]
fn a_change_that_the_kernel_makes_by_itself_is_told() {
    let sandbox = Sandbox::new("chunkspass");
    fs::write(sandbox.join("backing/f"), bytes(1, 300_000)).expect("write");
    let mount = FirnMount::new(&sandbox, "memory=32M,chunk-size=1M,passthrough=auto");
    let mut control = Control::new(&sandbox);
    // A reader that came first decides how later opens go, where the kernel passes through.
    let reader = fs::File::open(mount.join("f")).expect("open");
    let list = control.list("f").expect("a list");
    assert!(!control.changed(&list));
    let writer = open_rw(&mount.join("f"));
    writer.write_all_at(b"changed", 5).expect("write");
    assert!(control.changed(&list));
    drop((reader, writer));
    assert!(control.changed(&list));
}

/// Proves S-chunks-4.
#[test]
fn bad_requests_and_too_many_lists_are_refused() {
    let sandbox = Sandbox::new("chunksbad");
    let mount = FirnMount::new(&sandbox, DEMAND);
    fs::write(mount.join("f"), bytes(1, MIB)).expect("write");
    let mut control = Control::new(&sandbox);
    let mut other = Control::new(&sandbox);
    let errno = |reply: Option<Reply>| match reply {
        Some(Reply::Error { errno, .. }) => errno,
        other => panic!("{other:?}"),
    };
    let list = control.list("f").expect("a list");
    for number in [0, list.list + 1, u64::MAX] {
        assert_eq!(
            errno(control.ask(&Request::CheckChunks { list: number })),
            libc::EBADF
        );
        assert_eq!(
            errno(control.ask(&Request::ReleaseChunks { list: number })),
            libc::EBADF
        );
    }
    // Lists are a connection's own.
    assert_eq!(
        errno(other.ask(&Request::ReleaseChunks { list: list.list })),
        libc::EBADF
    );
    for _ in 1..1024 {
        control.list("f").expect("a list");
    }
    assert_eq!(control.list("f").expect_err("one too many"), libc::EMFILE);
    assert_eq!(mount.status().chunk_lists, 1024);
    control.release(&list);
    control.list("f").expect("there is room again");
    drop(control);
    wait_until("the lists end with their connection", LIMIT, || {
        mount.status().chunk_lists == 0
    });
    fs::remove_file(mount.join("f")).expect("unlink");
    assert_eq!(mount.status().arena_used_bytes, 0);
}

#[test]
fn firn_chunks_tells_people_and_scripts_where_a_file_is() {
    let sandbox = Sandbox::new("chunksverb");
    let mount = FirnMount::new(&sandbox, &spilling(&sandbox));
    let files = write_ranks(&mount);
    let told = |path: &Path| sandbox.run([OsStr::new("chunks"), path.as_os_str()]);
    let table = told(&files[0].0).ok().stdout;
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0], ["OFFSET", "BYTES", "WHERE", "CHUNK", "AT"]);
    let total: u64 = lines[1..]
        .iter()
        .map(|words| words[1].parse::<u64>().expect("a number"))
        .sum();
    assert_eq!(total, files[0].1.len() as u64);
    assert!(
        lines[1..]
            .iter()
            .all(|words| words.len() == 5 && words[2] == "spill"),
        "{table}"
    );

    let json =
        |path: &Path| sandbox.run([OsStr::new("chunks"), OsStr::new("--json"), path.as_os_str()]);
    let list = json(&files[3].0).ok().json();
    assert_eq!(
        (&list["path"], &list["bytes"]),
        (&"rank3".into(), &files[3].1.len().into())
    );
    assert_eq!(
        list["region"]["path"],
        sandbox.arena().to_str().expect("utf-8")
    );
    assert_eq!(list["region"]["spill"]["bytes"], 64 << 20);
    assert_eq!(list["pieces"][0]["offset"], 0);

    told(&sandbox.join("backing/.."))
        .code(10)
        .says("not on a firn mount");
    fs::create_dir(mount.join("dir")).expect("mkdir");
    told(&mount.join("dir"))
        .code(1)
        .says("is a directory: name a file");
    told(mount.path())
        .code(1)
        .says("is a directory: name a file");
    told(&mount.join("missing")).code(1).says("no such file");
    drain(&sandbox, &files[0].0);
    assert_eq!(evict(&sandbox, &files[0].0), (files[0].1.len() as u64, 0));
    told(&files[0].0)
        .code(1)
        .says("all of it is in the backing");
    let outcome = json(&files[0].0)
        .code(1)
        .says("all of it is in the backing");
    assert_eq!(outcome.json()["pieces"][0]["place"], "backing");
    assert_eq!(mount.status().chunk_lists, 0);
}

// ---- the C library -------------------------------------------------------------------------------

/// tests/c/list.c, holding a list.
struct Holder {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Holder {
    fn new(mut command: Command, path: &Path) -> Self {
        command
            .arg("hold")
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("start the program");
        let orders = child.stdin.take().expect("piped");
        let answers = child.stdout.take().expect("piped");
        let mut holder = Self {
            child,
            orders,
            answers: BufReader::new(answers),
        };
        assert_eq!(holder.answer(), "held");
        holder
    }

    fn order(&mut self, word: &str) -> String {
        writeln!(self.orders, "{word}").expect("it takes orders");
        self.answer()
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("it answers");
        line.trim().to_owned()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Proves S-chunks-1, S-chunks-2: a checkpoint is copied out of memory and the spill file, as an agent for RDMA
/// does, while other files are written.
#[test]
fn a_c_program_copies_a_checkpoint_past_the_mount() {
    let sandbox = Sandbox::new("chunksc");
    let installed = Installed::new(&sandbox);
    let mount = FirnMount::new(&sandbox, &spilling(&sandbox));
    let mut files = write_ranks(&mount);
    // One that has holes and parts in the backing.
    let mixed = open_rw(&mount.join("mixed"));
    mixed.write_all_at(&bytes(20, MIB), 0).expect("write");
    drain(&sandbox, &mount.join("mixed"));
    evict(&sandbox, &mount.join("mixed"));
    mixed
        .write_all_at(&bytes(21, 5000), 300_000)
        .expect("write");
    mixed
        .write_all_at(&bytes(22, 5000), 2 << 20)
        .expect("write");
    drop(mixed);
    files.push((mount.join("mixed"), read(&mount.join("mixed"))));
    fs::write(mount.join("empty"), b"").expect("write");
    files.push((mount.join("empty"), Vec::new()));
    for link in [Link::Shared, Link::Static] {
        let mover = installed.compile("examples/chunks/mover.c", link);
        let mut command = installed.command(&mover);
        if link == Link::Static {
            command.env_remove("LD_LIBRARY_PATH");
        }
        let target =
            |path: &Path| sandbox.join(format!("copy-{}", path.file_name().unwrap().display()));
        for (path, _) in &files {
            command.arg(path).arg(target(path));
        }
        let stop = AtomicBool::new(false);
        let outcome = std::thread::scope(|scope| {
            let ended = StopAtEnd(&stop);
            let writer = scope.spawn(|| churn(mount.path(), 7, &stop));
            let outcome = run(&mut command).ok();
            drop(ended);
            writer.join().expect("a writer");
            outcome
        });
        let sum = |what: &str| -> usize {
            let words = outcome
                .stdout
                .split_whitespace()
                .filter_map(|word| word.strip_prefix(what));
            words
                .map(|number| number.parse::<usize>().expect("a number"))
                .sum()
        };
        assert_eq!(sum("backing="), MIB - 5000, "{outcome}");
        assert!(sum("memory=") > 0 && sum("spill=") > 0, "{outcome}");
        assert_eq!(
            sum("memory=") + sum("spill="),
            files.iter().map(|f| f.1.len()).sum::<usize>() - (2 << 20) + 5000
        );
        for (path, data) in &files {
            assert_same_bytes(&format!("{link:?} {path:?}"), &read(&target(path)), data);
            fs::remove_file(target(path)).expect("remove");
        }
    }
}

/// Proves S-chunks-2, S-chunks-4: the end of a process ends its lists, and the end of firnd is told.
#[test]
fn lists_of_a_c_program_end_with_it_and_with_firnd() {
    let sandbox = Sandbox::new("chunksdead");
    let installed = Installed::new(&sandbox);
    let program = installed.compile("tests/c/list.c", Link::Shared);
    let options = spilling(&sandbox);
    let mount = FirnMount::new(&sandbox, &options);
    let files = write_ranks(&mount);
    let (path, data) = &files[3];
    let mut holder = Holder::new(installed.command(&program), path);
    assert_eq!(
        (holder.order("sum"), holder.order("check")),
        (sum(data), "0 0".into())
    );
    let used = mount.status().arena_used_bytes;
    fs::remove_file(path).expect("unlink");
    assert_eq!(
        mount.status().arena_used_bytes,
        used,
        "the room is not free yet"
    );
    assert_eq!(
        (holder.order("sum"), holder.order("check")),
        (sum(data), "0 1".into())
    );
    // A kill, at which nothing is told to firnd but the end of the connection.
    holder.child.kill().expect("kill");
    wait_until("its room is free", LIMIT, || {
        let status = mount.status();
        status.chunk_lists == 0 && status.arena_used_bytes < used
    });

    let (path, data) = &files[2];
    let mut holder = Holder::new(installed.command(&program), path);
    assert_eq!(holder.order("sum"), sum(data));
    mount.kill();
    let stale = format!("{} 0", libc::ESTALE);
    assert_eq!(
        holder.order("check"),
        stale,
        "no SIGPIPE, and no list without firnd"
    );
    let mount = FirnMount::new(&sandbox, &options);
    assert_eq!(
        holder.order("check"),
        stale,
        "a later firnd knows nothing of it"
    );
    assert_eq!(holder.order("again"), "held");
    assert_eq!(
        (holder.order("sum"), holder.order("check")),
        (sum(data), "0 0".into())
    );
    // A list is no reason to refuse the unmount: what it names is in the backing then.
    let backing = mount.umount();
    assert_eq!(holder.order("check"), stale);
    assert_same_bytes("in the backing", &read(&backing.join("rank2")), data);
}

#[test]
fn the_c_library_tells_every_error_and_takes_several_threads() {
    let sandbox = Sandbox::new("chunksapi");
    let installed = Installed::new(&sandbox);
    let program = installed.compile("tests/c/list.c", Link::Static);
    let mount = FirnMount::new(&sandbox, &spilling(&sandbox));
    let files = write_ranks(&mount);
    let (dir, file) = (mount.join("dir"), mount.join("dir/file"));
    fs::create_dir(&dir).expect("mkdir");
    fs::write(&file, bytes(1, 70_000)).expect("write");
    run(installed
        .command(&program)
        .arg("errors")
        .args([&file, &dir])
        .arg(sandbox.path()))
    .ok();
    assert_eq!(mount.status().chunk_lists, 0);
    run(installed
        .command(&program)
        .arg("threads")
        .arg(&file)
        .arg("8"))
    .ok();
    run(installed
        .command(&program)
        .arg("threads")
        .arg(&files[0].0)
        .arg("2"))
    .ok();
}

#[test]
fn what_is_installed_is_where_pkg_config_and_the_linker_look() {
    let sandbox = Sandbox::new("chunksinstall");
    let installed = Installed::new(&sandbox);
    let version = installed.pkg_config(&["--modversion"]);
    assert_eq!(version, [env!("CARGO_PKG_VERSION")]);
    let library = fs::canonicalize(installed.join("lib/libfirn.so.0"))
        .expect("the name that programs ask for");
    assert!(
        library.ends_with(format!("libfirn.so.{}", env!("CARGO_PKG_VERSION"))),
        "{library:?}"
    );
    let link = fs::canonicalize(installed.join("sbin/mount.firn")).expect("the helper of mount(8)");
    assert_eq!(
        link,
        fs::canonicalize(installed.join("bin/firn")).expect("the program")
    );
    assert!(installed.join("share/man/man1/firn-chunks.1").exists());
    let completions = read(&installed.join("share/bash-completion/completions/firn"));
    assert!(
        String::from_utf8_lossy(&completions).contains("firn__subcmd__chunks"),
        "bash completes `chunks`"
    );
    // The header is one that C++ takes, and needs nothing before it.
    let header = sandbox.join("header.cc");
    fs::write(
        &header,
        "#include <firn.h>\nint main() { firn *mount; return firn_open(\"/\", &mount) == 0; }\n",
    )
    .expect("write");
    let flags = installed.pkg_config(&["--cflags"]);
    let words = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-fsyntax-only",
    ];
    run(Command::new("c++").args(words).args(flags).arg(&header)).ok();

    // For a package: the same paths in the files, all of it below another directory.
    let package = sandbox.join("package");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/install");
    let install = |args: &[&OsStr]| run(Command::new(&script).args(args));
    let from = firn_tests::sandbox::firn_binary()
        .parent()
        .expect("a directory")
        .to_owned();
    let args = [
        "--from".as_ref(),
        from.as_os_str(),
        "--destdir".as_ref(),
        package.as_os_str(),
    ];
    install(
        &[
            &args[..],
            &[
                "--prefix".as_ref(),
                "/usr".as_ref(),
                "--libdir".as_ref(),
                "/usr/lib64".as_ref(),
            ],
        ]
        .concat(),
    )
    .ok();
    let config =
        String::from_utf8(read(&package.join("usr/lib64/pkgconfig/firn.pc"))).expect("utf-8");
    assert!(
        config.contains("libdir=/usr/lib64\n") && !config.contains("package"),
        "{config}"
    );
    install(&["--prefix".as_ref(), "relative".as_ref()])
        .code(2)
        .says("absolute");
    install(&["--from".as_ref(), sandbox.path().as_os_str()])
        .code(1)
        .says("run `make` first");
}

/// Proves S-demand-1.
#[test]
fn a_c_program_asks_for_the_state_drains_and_waits() {
    let sandbox = Sandbox::new("cstate");
    let installed = Installed::new(&sandbox);
    let program = installed.compile("tests/c/state.c", Link::Shared);
    let fault = FaultFs::new(&sandbox);
    let mount = FirnMount::over(
        &sandbox,
        fault.path(),
        "arena-size=16M,drain=demand,attr-timeout=10min",
    );
    let path = mount.join("file");
    let state = |args: &[&str]| {
        let mut command = installed.command(&program);
        command.args(args);
        run(&mut command).ok();
    };
    let file = path.to_str().expect("a plain name");
    fs::write(&path, bytes(1, MIB)).expect("write");
    state(&["drain", file, &MIB.to_string()]);
    assert_same_bytes(
        "backing",
        &read(&fault.source().join("file")),
        &bytes(1, MIB),
    );
    fs::write(&path, bytes(2, MIB)).expect("write");
    fault.hang("write", "file");
    state(&["late", file]);
    fault.let_go();
}

#[test]
fn a_c_program_asks_for_room_levels_and_checkpoints() {
    let sandbox = Sandbox::new("croom");
    let installed = Installed::new(&sandbox);
    let program = installed.compile("tests/c/state.c", Link::Shared);
    let mount = FirnMount::new(&sandbox, "arena-size=16M,drain=demand");
    fs::create_dir(mount.join("step_7")).expect("a directory");
    fs::create_dir(mount.join("notes")).expect("a directory without a step");
    let path = mount.join("step_7/file");
    fs::write(&path, bytes(3, MIB)).expect("write");
    let state = |args: &[&std::ffi::OsStr]| {
        let mut command = installed.command(&program);
        run(command.args(args)).ok();
    };
    let (dir, size) = (mount.join(""), MIB.to_string());
    let file = path.as_os_str();
    state(&["steps".as_ref(), file, dir.as_os_str(), size.as_ref()]);
    state(&["room".as_ref(), file]);
}

/// What a program compiled with an older firn.h has no room for is not written.
#[test]
fn structures_of_an_older_c_program_are_filled_as_far_as_they_go() {
    let sandbox = Sandbox::new("colder");
    let installed = Installed::new(&sandbox);
    let mount = FirnMount::new(&sandbox, "arena-size=16M,drain=demand");
    let path = mount.join("file");
    fs::write(&path, bytes(1, MIB)).expect("write");
    for link in [Link::Shared, Link::Static] {
        let program = installed.compile("tests/c/state.c", link);
        let mut command = installed.command(&program);
        command.arg("older").arg(&path);
        run(&mut command).ok();
    }
}
