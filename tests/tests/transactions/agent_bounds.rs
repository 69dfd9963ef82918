//! What an agent says is bounded: one that has the key and says too much, or nothing new for ever, takes neither the
//! memory nor the time of a puller or of a partner.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firn_agent::Link;
use firn_agent::message::{
    BLOCK_BYTES, Entry, EntryKind, ErrorKind, Held, LIST_NAME_BYTES_MAX, PATH_BYTES_MAX, Reply,
    Request,
};
use firn_agent::{KeyFile, Stream, WireError};
use firn_format::record::Ending;
use firn_tests::agent::{Agent, FakeAgent, HOST, ask, greet, pull_command, say, staging_of};
use firn_tests::command::{Outcome, run, wait_until};
use firn_tests::sandbox::firn_binary;
use firn_tests::{FirnMount, Sandbox};

const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of addresses that a puller may have: far more than it takes.
const ADDRESS_SPACE_KIB: u64 = 2 << 20;

fn entry(path: impl Into<Vec<u8>>, kind: EntryKind) -> Entry {
    Entry {
        path: path.into().into(),
        kind,
        mode: 0o755,
        mtime_s: 1_700_000_000,
        mtime_ns: 0,
        held: None,
    }
}

fn file(path: &str, bytes: u64) -> Entry {
    let ending = Ending::Closed;
    entry(path, EntryKind::File { bytes, ending })
}

fn listed(entries: Vec<Entry>) -> [Reply; 2] {
    let path = "".into();
    [Reply::Entries { entries }, Reply::Listed { path }]
}

/// Pulls all of an agent with little memory. A puller that never ends is ended.
fn pull_all(sandbox: &Sandbox, backing: &Path, extra: &[&str]) -> Outcome {
    let target = sandbox.join("copy");
    let command = pull_command(sandbox, backing, Path::new("/any"), &target, extra);
    let mut limited = Command::new("sh");
    limited.envs(
        command
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    let script = format!("ulimit -v {ADDRESS_SPACE_KIB} && exec timeout 100 \"$@\"");
    limited.args(["-c", &script, "sh"]).arg(firn_binary());
    let told = run(limited.args(command.get_args()));
    assert!(!target.exists(), "{told}");
    let _ = fs::remove_dir_all(staging_of(&target));
    told
}

fn backing(sandbox: &Sandbox) -> PathBuf {
    sandbox.mkdir("backing")
}

/// Proves S-agent-17.
#[test]
fn regression_a_file_of_any_size_takes_no_memory_before_its_bytes_come() {
    let sandbox = Sandbox::new("bounds-huge");
    let backing = backing(&sandbox);
    let reads = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&reads);
    let _agent = FakeAgent::start(&backing, HOST, move |link, request| match request {
        Request::List { .. } => say(link, &listed(vec![file("", 10)])),
        Request::Open { .. } => {
            let bytes = 1 << 62;
            let changes = None;
            say(link, &[Reply::Opened { bytes, changes }])
        }
        Request::Read { .. } if counted.fetch_add(1, Ordering::Relaxed) < 100 => {
            let bytes = BLOCK_BYTES;
            let mac = link.block_hasher().map(|hasher| hasher.finish());
            say(link, &[Reply::Zeros { bytes }, Reply::End { mac }])
        }
        Request::Read { .. } => say(
            link,
            &[Reply::Error {
                kind: ErrorKind::Refused,
                message: "that is all".into(),
            }],
        ),
        other => panic!("{other:?}"),
    });
    pull_all(&sandbox, &backing, &[])
        .code(1)
        .says("that is all");
    assert!(reads.load(Ordering::Relaxed) > 100);
}

/// Sends what is to be a list.
type Send = fn(&mut Link<Stream>) -> Result<(), WireError>;

/// Proves S-agent-17.
#[test]
fn regression_a_list_without_an_end_is_given_up() {
    let sandbox = Sandbox::new("bounds-list");
    let backing = backing(&sandbox);
    let cases: [(&str, Send); 3] = [
        ("a part of a list without entries", |link| {
            loop {
                say(link, &[Reply::Entries { entries: vec![] }])?;
            }
        }),
        ("more entries than a list may have", |link| {
            for number in 0..=LIST_NAME_BYTES_MAX / PATH_BYTES_MAX {
                let target = vec![b'x'; PATH_BYTES_MAX].into();
                let link_entry = entry(number.to_string(), EntryKind::Link { target });
                let entries = vec![link_entry];
                say(link, &[Reply::Entries { entries }])?;
            }
            // The puller has hung up.
            loop {
                say(link, &[Reply::Entries { entries: vec![] }])?;
            }
        }),
        ("a name of more than", |link| {
            let entries = vec![
                entry("", EntryKind::Directory),
                entry("x".repeat(PATH_BYTES_MAX + 1), EntryKind::Directory),
            ];
            say(link, &[Reply::Entries { entries }])
        }),
    ];
    for (says, send) in cases {
        let _agent = FakeAgent::start(&backing, HOST, move |link, request| match request {
            Request::List { .. } => send(link),
            other => panic!("{other:?}"),
        });
        pull_all(&sandbox, &backing, &[]).code(1).says(says);
    }
}

/// Proves S-agent-17: an agent that is always full.
#[test]
fn regression_an_agent_that_only_says_wait_is_given_up() {
    let sandbox = Sandbox::new("bounds-full");
    let backing = backing(&sandbox);
    let _agent = FakeAgent::start(&backing, HOST, |link, request| match request {
        Request::List { .. } => say(link, &listed(vec![file("", 10)])),
        Request::Open { .. } => say(link, &[Reply::Full]),
        other => panic!("{other:?}"),
    });
    pull_all(&sandbox, &backing, &["--patience", "1s"])
        .code(1)
        .says("holds as much memory for other pulls as its --hold-max allows");
}

/// Proves S-agent-17: zeros and bytes in turn, of one byte each, for as many blocks as a puller asks ahead.
#[test]
fn a_block_in_crumbs_takes_no_more_memory_than_a_block() {
    let sandbox = Sandbox::new("bounds-crumbs");
    let backing = backing(&sandbox);
    let _agent = FakeAgent::start(&backing, HOST, |link, request| match request {
        Request::List { .. } => say(link, &listed(vec![file("", 3 * BLOCK_BYTES)])),
        Request::Open { .. } => {
            let bytes = 3 * BLOCK_BYTES;
            let changes = None;
            say(link, &[Reply::Opened { bytes, changes }])
        }
        Request::Read { bytes, .. } => {
            let mut hasher = link.block_hasher().expect("not encrypted");
            let until = std::time::Instant::now() + LIMIT;
            let many = 20_000;
            for _ in 0..many {
                hasher.update(b"x");
                say(link, &[Reply::Bytes { bytes: 1 }])?;
                link.send_data(b"x", until)?;
                say(link, &[Reply::Zeros { bytes: 1 }])?;
            }
            let mac = Some(hasher.finish());
            let rest = Reply::Zeros {
                bytes: bytes - 2 * many,
            };
            say(link, &[rest, Reply::End { mac }])
        }
        Request::Check { .. } => say(
            link,
            &[Reply::Checked {
                changed: false,
                snapshot: true,
            }],
        ),
        Request::Release { .. } => say(link, &[Reply::Done]),
        other => panic!("{other:?}"),
    });
    let target = sandbox.join("copy");
    run(&mut pull_command(
        &sandbox,
        &backing,
        Path::new("/any"),
        &target,
        &[],
    ))
    .ok();
    let copy = fs::read(&target).expect("the copy");
    assert_eq!(copy.len() as u64, 3 * BLOCK_BYTES);
    for block in copy.chunks(BLOCK_BYTES as usize) {
        let (crumbs, rest) = block.split_at(40_000);
        assert!(crumbs.chunks(2).all(|pair| pair == [b'x', 0]));
        assert!(rest.iter().all(|byte| *byte == 0));
    }
}

/// Proves S-partner-7: the room of a partner counts what it stores, not what was listed.
#[test]
fn regression_a_partner_stores_no_more_than_it_has_room_for() {
    let sandbox = Sandbox::new("bounds-partner");
    let mount = FirnMount::new(
        &sandbox,
        "arena-size=32M,chunk-size=1M,drain=demand,partner=next",
    );
    let opened = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&opened);
    let read = Arc::<AtomicU64>::default();
    let wanted = Arc::clone(&read);
    let liar = FakeAgent::start(
        mount.backing(),
        "liar",
        move |link, request| match request {
            Request::Follow { .. } => say(
                link,
                &[Reply::Following {
                    incarnation: "firnd".into(),
                    arena: "arena".into(),
                }],
            ),
            Request::ListHeld { path } => {
                let held = Some(Held {
                    changes: 1,
                    partnered: false,
                });
                let unit = Entry {
                    held,
                    ..file(if path.is_empty() { "unit" } else { "" }, 10)
                };
                let top = path.is_empty().then(|| entry("", EntryKind::Directory));
                let entries = top.into_iter().chain([unit]).collect();
                say(link, &[Reply::Entries { entries }, Reply::Listed { path }])
            }
            Request::Open { .. } => {
                counted.fetch_add(1, Ordering::Relaxed);
                let bytes = 1 << 40;
                let changes = Some(1);
                say(link, &[Reply::Opened { bytes, changes }])
            }
            Request::Note { .. } | Request::Beat | Request::Mark { .. } | Request::Adopt { .. } => {
                say(link, &[Reply::Done])
            }
            Request::Read { .. } => {
                wanted.fetch_add(1, Ordering::Relaxed);
                Err(WireError::Ended)
            }
            other => panic!("{other:?}"),
        },
    );
    let agent = Agent::start(&sandbox, mount.path(), &["--partner-size", "1M"]);
    let file = KeyFile::load(mount.backing(), HOST).expect("the key file");
    let socket = std::net::TcpStream::connect(&file.address).expect("connect");
    let adopted = ask(
        &mut greet(socket, &file),
        &Request::Adopt {
            host: "liar".into(),
        },
    );
    assert_eq!(adopted, Reply::Done, "{}", agent.log());
    wait_until("it tries again and again", LIMIT, || {
        opened.load(Ordering::Relaxed) > 2
    });
    assert_eq!(read.load(Ordering::Relaxed), 0, "it took what has no room");
    drop(liar);
    assert_eq!(agent.end(), Some(0));
}
