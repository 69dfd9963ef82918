//! Many connections to the control socket: which go, which stay, and what is answered all the same.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use firn_client::{ClientError, Connection, Mount};
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use firn_protocol::{Reply, Request};
use firn_tests::c::{Installed, Link};
use firn_tests::chunks::Control;
use firn_tests::faultfs::FaultFs;
use firn_tests::mount::patient;
use firn_tests::sandbox::is_mounted;
use firn_tests::{FirnMount, Sandbox, wait_until};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LIMIT: Duration = Duration::from_secs(20);
/// Connections of the control socket that firnd serves at once (docs/internals/daemon.md).
const ORDINARY: usize = 64;
const RESERVE: usize = 8;
/// All connections are in use (docs/OPERATIONS.md).
const BUSY: i32 = 12;

fn many_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    )
    .expect("raise the limit");
}

/// Connections that were answered once and say nothing more.
fn idle(sandbox: &Sandbox, count: usize) -> Vec<Control> {
    let greet = |_| {
        let mut control = Control::new(sandbox);
        assert!(matches!(
            control.ask(&Request::Hello),
            Some(Reply::Hello { .. })
        ));
        control
    };
    (0..count).map(greet).collect()
}

fn holding(sandbox: &Sandbox, count: usize) -> Vec<(Control, firn_protocol::ChunkList)> {
    let hold = |mut control: Control| {
        let list = control.list("f").expect("a list");
        (control, list)
    };
    (0..count).map(|_| hold(Control::new(sandbox))).collect()
}

fn firn(sandbox: &Sandbox, args: &[&str], path: &Path) -> firn_tests::Outcome {
    sandbox.run(args.iter().map(OsStr::new).chain([path.as_os_str()]))
}

#[test]
fn regression_connections_that_say_nothing_keep_nobody_out() {
    many_descriptors();
    let sandbox = Sandbox::new("idle");
    for (count, force) in [(ORDINARY, false), (1000, false), (1000, true)] {
        let mount = FirnMount::new(&sandbox, &patient("close=held"));
        fs::write(mount.join("f"), "text").expect("write");
        let mut connections = idle(&sandbox, count);
        let status = mount.status();
        assert_eq!((status.held_bytes, status.pid), (4, mount.pid()));
        firn(&sandbox, &["wait", "--until", "durable"], mount.path()).ok();
        firn(&sandbox, &["ls"], mount.path()).ok();
        // Those that were answered last are still there, the others were told.
        let last = connections.last_mut().expect("some");
        assert!(matches!(
            last.ask(&Request::Hello),
            Some(Reply::Hello { .. })
        ));
        let first = connections[0].ask(&Request::Hello);
        assert!(matches!(first, Some(Reply::Closed) | None), "{first:?}");
        let point = mount.path().to_owned();
        let backing = mount.backing().to_owned();
        let args = if force {
            &["umount", "--force"][..]
        } else {
            &["umount"]
        };
        firn(&sandbox, args, &point).ok();
        assert!(!is_mounted(&point));
        mount.wait_for_end();
        mount.abandon();
        assert_eq!(fs::read(backing.join("f")).expect("drained"), b"text");
    }
}

/// What a connection holds ends with it, so it is not closed, however many come.
/// Proves S-chunks-5, S-chunks-8.
#[test]
fn regression_connections_that_hold_lists_stay_and_leave_the_reserve() {
    many_descriptors();
    let sandbox = Sandbox::new("holding");
    let mount = FirnMount::new(&sandbox, &patient("drain=demand,passthrough=off"));
    fs::write(mount.join("f"), vec![7; 100_000]).expect("write");
    let mut holders = holding(&sandbox, ORDINARY);
    for round in 0..3 {
        // Others come, and the reserve is not for them to sit on.
        let _idle = idle(&sandbox, 3 * RESERVE);
        assert_eq!(mount.status().chunk_lists, ORDINARY as u64, "round {round}");
        let refused = firn(&sandbox, &["wait", "--until", "drained"], mount.path()).code(BUSY);
        let who = format!(
            "process {} has {}",
            std::process::id(),
            ORDINARY + RESERVE - 1
        );
        assert!(
            refused.stderr.contains("all 64 connections are in use"),
            "{refused}"
        );
        assert!(refused.stderr.contains(&who), "{who} is not in {refused}");
        firn(&sandbox, &["status", "--prometheus"], mount.path())
            .ok()
            .says("");
    }
    for (control, list) in &mut holders {
        assert!(!control.changed(list), "every list still holds");
    }
    // One that gives its list up is idle, and goes to a client that asks for more than the reserve gives.
    let (mut control, list) = holders.swap_remove(5);
    control.release(&list);
    firn(&sandbox, &["ls"], mount.path()).ok();
    assert_eq!(mount.status().chunk_lists, ORDINARY as u64 - 1);
    let point = mount.path().to_owned();
    let backing = mount.backing().to_owned();
    firn(&sandbox, &["umount"], &point).ok();
    assert!(!is_mounted(&point));
    mount.wait_for_end();
    mount.abandon();
    assert_eq!(
        fs::read(backing.join("f")).expect("drained"),
        vec![7; 100_000]
    );
}

/// A request that is being answered is not cut off, and a request for the status is answered beside 64 of them.
#[test]
fn regression_requests_under_way_are_not_cut_off_and_leave_the_reserve() {
    let sandbox = Sandbox::new("waiting");
    let faulty = FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, faulty.path(), &patient("close=held"));
    let mut file = fs::File::create(mount.join("f")).expect("create");
    faulty.stall();
    file.write_all(b"text").expect("write");
    let begin = |_| {
        let mut control = Control::new(&sandbox);
        let wait = Request::Wait {
            path: BytePath::default(),
            until: DurabilityLevel::Drained,
            timeout_ms: None,
        };
        let said = control.ask(&wait);
        assert!(matches!(said, Some(Reply::Progress { .. })), "{said:?}");
        control
    };
    let mut waiting: Vec<_> = (0..ORDINARY).map(begin).collect();
    let _idle = idle(&sandbox, 3 * RESERVE);
    assert_eq!(mount.status().held_bytes, 4);
    firn(&sandbox, &["drain"], mount.path())
        .code(BUSY)
        .says("are in use");
    faulty.go_on();
    for control in &mut waiting {
        let last = std::iter::repeat_with(|| control.next_reply().expect("an answer"))
            .find(|said| !matches!(said, Reply::Progress { .. }));
        assert_eq!(last, Some(Reply::Done));
    }
    drop(file);
    firn(&sandbox, &["drain", "--wait"], mount.path()).ok();
    mount.umount();
}

/// Far more at once than there are places: each is answered or told that it is not, and nothing is done twice.
#[test]
fn regression_a_crowd_is_answered_or_told_and_never_thinks_firnd_dead() {
    let sandbox = Sandbox::new("crowd");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let found = Mount {
        backing: mount.backing().canonicalize().expect("canonical"),
        mount_point: mount.path().to_owned(),
        user_id: 0,
        is_tree: false,
        runtime_dir: sandbox.runtime().to_owned(),
    };
    let ask = || -> Result<(), ClientError> {
        let mut connection = Connection::open(&found)?;
        for _ in 0..5 {
            connection.status()?;
            std::thread::yield_now();
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..200).map(|_| scope.spawn(ask)).collect();
        let mut busy = 0;
        for client in clients {
            match client.join().expect("a client") {
                Ok(()) => {}
                Err(ClientError::Busy { .. }) => busy += 1,
                Err(other) => panic!("{other}"),
            }
        }
        println!("{busy} of 200 were told that there is no room");
    });
    mount.umount();
}

/// tests/c/list.c, with a handle.
struct Program {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("it answers");
        line.trim().to_owned()
    }

    fn order(&mut self, word: &str) -> String {
        writeln!(self.orders, "{word}").expect("it takes orders");
        self.answer()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Proves S-chunks-7.
#[test]
fn regression_a_c_program_whose_idle_connection_was_closed_goes_on() {
    let sandbox = Sandbox::new("idle-c");
    let installed = Installed::new(&sandbox);
    let mut command = installed.command(&installed.compile("tests/c/list.c", Link::Shared));
    let mount = FirnMount::new(&sandbox, &patient("drain=demand,passthrough=off"));
    fs::write(mount.join("f"), vec![7; 100_000]).expect("write");
    command
        .arg("hold")
        .arg(mount.join("f"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("start the program");
    let orders = child.stdin.take().expect("piped");
    let answers = child.stdout.take().expect("piped");
    let mut program = Program {
        child,
        orders,
        answers: BufReader::new(answers),
    };
    assert_eq!(program.answer(), "held");
    // While it holds a list it stays.
    let crowd = idle(&sandbox, 2 * ORDINARY);
    assert_eq!(
        (program.order("check"), mount.status().chunk_lists),
        ("0 0".into(), 1)
    );
    let sum = program.order("sum");
    assert_eq!(program.order("free"), "free");
    drop(crowd);
    // Now it goes, and does not notice.
    for _ in 0..3 {
        drop(idle(&sandbox, 2 * ORDINARY));
        assert_eq!(program.order("list"), "held");
        assert_eq!(
            (program.order("check"), program.order("sum")),
            ("0 0".into(), sum.clone())
        );
        assert_eq!(mount.status().chunk_lists, 1);
        assert_eq!(program.order("free"), "free");
    }
    // A later firnd is not taken for the one that it knows.
    drop(idle(&sandbox, 2 * ORDINARY));
    mount.umount();
    let mount = FirnMount::new(&sandbox, &patient("drain=demand,passthrough=off"));
    writeln!(program.orders, "list").expect("it takes orders");
    wait_until("it ends with an error", LIMIT, || {
        program.child.try_wait().expect("wait").is_some()
    });
    assert_eq!(mount.status().chunk_lists, 0);
    mount.umount();
}
