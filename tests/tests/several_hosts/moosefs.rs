//! Placement on a real distributed file system: MooseFS, a master and four chunk servers in a network namespace.
//!
//! Needs root, FUSE and Debian's moosefs-master, moosefs-chunkserver and moosefs-client.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use firn_testfs::moosefs::{MooseFs, Server};
use firn_tests::command::run;
use firn_tests::fsops::assert_same_bytes;
use firn_tests::mount::mount_args;
use firn_tests::suite::has_moosefs;
use firn_tests::{FirnMount, Sandbox};

const LABELS: [char; 4] = ['A', 'B', 'C', 'D'];
/// Of each file: larger than a chunk of Firn's.
const FILE_BYTES: usize = 5 << 20;

/// A MooseFS with a storage class for each of its chunk servers: on_A to on_D. None where the release has no MooseFS.
fn start(sandbox: &Sandbox) -> Option<MooseFs> {
    if !has_moosefs() {
        return None;
    }
    let servers = LABELS.map(|label| Server {
        label: Some(label),
        disk: None,
    });
    let moosefs = MooseFs::start(sandbox.path(), &servers).expect("MooseFS");
    for label in LABELS {
        moosefs
            .make_class(&format!("on_{label}"), label)
            .expect("a storage class");
    }
    fs::create_dir(moosefs.point().join("run")).expect("the backing");
    Some(moosefs)
}

const OPTIONS: &str = "arena-size=64M,chunk-size=1M,placement=moosefs,servers=on_A:on_B:on_C:on_D";

/// The addresses of the servers that have chunks of a file, as MooseFS says.
fn addresses(file: &Path) -> Vec<String> {
    let output = run(std::process::Command::new("mfsfileinfo").arg(file));
    let text = output.ok().stdout;
    let copies = text.lines().filter(|line| line.contains("copy "));
    let mut found: Vec<String> = copies
        .filter_map(|line| {
            line.split_whitespace()
                .find(|word| word.contains(':') && word.starts_with("10."))
        })
        .map(|address| address.split(':').next().expect("an address").to_owned())
        .collect();
    found.sort();
    found.dedup();
    found
}

/// Proves S-place-10.
#[test]
fn each_file_is_whole_on_the_server_that_it_was_given_to() {
    let sandbox = Sandbox::new("moosefs");
    let Some(moosefs) = start(&sandbox) else {
        return;
    };
    let backing = moosefs.point().join("run");
    let mount = FirnMount::over(&sandbox, &backing, OPTIONS);
    for rank in 0..8 {
        fs::write(
            mount.path().join(format!("rank_{rank}")),
            vec![rank as u8; FILE_BYTES],
        )
        .unwrap();
    }
    let status = mount.status();
    assert_eq!(status.misplaced_files, 0);
    for (lane, name) in status.lanes.iter().zip(["on_A", "on_B", "on_C", "on_D"]) {
        let placed = lane.placed.as_ref().expect("placement");
        assert_eq!((lane.path.to_string(), placed.files), (name.to_owned(), 2));
    }
    let explain = |name: &str| {
        let path = mount.path().join(name);
        let args = [
            OsStr::new("place"),
            OsStr::new("--explain"),
            path.as_os_str(),
        ];
        run(&mut sandbox.firn(args)).ok().stdout
    };
    let known = explain("rank_6");
    assert!(known.contains("rank_6 is on on_C"), "{known}");
    let new = explain("rank_9");
    assert!(
        new.contains("does not exist") && new.contains("goes to on_B"),
        "{new}"
    );
    mount.umount();

    let mut by_address: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for rank in 0..8 {
        let file = backing.join(format!("rank_{rank}"));
        assert_eq!(fs::read(&file).unwrap(), vec![rank as u8; FILE_BYTES]);
        let found = addresses(&file);
        assert_eq!(found.len(), 1, "rank {rank} is on {found:?}");
        by_address.entry(found[0].clone()).or_default().push(rank);
    }
    let lanes = moosefs.addresses().iter().cloned().zip(0..);
    let expected = lanes.map(|(address, lane)| (address, vec![lane, lane + 4]));
    assert_eq!(by_address, expected.collect());
    let left = fs::read_dir(backing.join(".firn/steering")).unwrap();
    for host in left {
        for lane in fs::read_dir(host.unwrap().path()).unwrap() {
            let dir = lane.unwrap().path();
            assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "{dir:?}");
        }
    }
}

/// Proves S-place-10.
#[test]
fn a_file_gets_owner_group_and_mode_as_in_any_directory() {
    let sandbox = Sandbox::new("moosefs-owner");
    let Some(moosefs) = start(&sandbox) else {
        return;
    };
    let backing = moosefs.point().join("run");
    let shared = backing.join("shared");
    fs::create_dir(&shared).unwrap();
    run(std::process::Command::new("chmod").arg("2777").arg(&shared)).ok();
    run(std::process::Command::new("chgrp").arg("4321").arg(&shared)).ok();
    let mount = FirnMount::over(&sandbox, &backing, &format!("{OPTIONS},allow-other=yes"));
    let script =
        r#"umask 027; echo data > "$0/shared/rank_2"; ! (set -C; echo again > "$0/shared/rank_2")"#;
    let mut as_user = std::process::Command::new("setpriv");
    as_user.args([
        "--reuid=1234",
        "--regid=1235",
        "--clear-groups",
        "sh",
        "-c",
        script,
    ]);
    run(as_user.arg(mount.path())).ok();
    mount.umount();
    let file = shared.join("rank_2");
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!(
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777),
        (1234, 4321, 0o640)
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), "data\n");
    assert_eq!(addresses(&file), [moosefs.addresses()[2].as_str()]);
}

/// Proves S-log-37 on the servers of one file system: two hosts, each a client of its own, write one file, and the logs of
/// each are whole on the server of its turn.
#[test]
fn hosts_write_one_file_to_logs_on_different_servers() {
    let sandbox = Sandbox::new("moosefs-log");
    let Some(mut moosefs) = start(&sandbox) else {
        return;
    };
    let clients = [
        moosefs.point().to_owned(),
        moosefs
            .mount_for(&sandbox.mkdir("second"))
            .expect("a second client"),
    ];
    // In this network namespace: MooseFS's tools talk to the master.
    let hosts = ["n0", "n1"].map(|host| Sandbox::new(&format!("moosefs-{host}")));
    let options = format!("{OPTIONS},layout=log,flatten=demand");
    let mut mounts = Vec::new();
    for (number, host) in hosts.iter().enumerate() {
        let options = format!("{options},host=n{number}");
        let backing = clients[number].join("run");
        mounts.push(FirnMount::over(host, &backing, &options));
    }
    let files: Vec<File> = mounts
        .iter()
        .map(|mount| {
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            options.open(mount.path().join("shared")).unwrap()
        })
        .collect();
    const RECORD_BYTES: usize = 100_000;
    let record = |number: u64| vec![number as u8 + 1; RECORD_BYTES];
    for number in 0..80 {
        let offset = number * RECORD_BYTES as u64;
        let file = &files[number as usize % 2];
        file.write_all_at(&record(number), offset).unwrap();
    }
    files.iter().for_each(|file| file.sync_all().unwrap());
    drop(files);
    let servers = ["n0", "n1"].map(|host| servers_of_logs(&clients[0].join("run"), host));
    assert!(
        servers.iter().all(|servers| servers.len() == 1),
        "{servers:?}"
    );
    assert_ne!(servers[0], servers[1]);
    for mount in mounts {
        mount.umount();
    }
    let found = fs::read(clients[1].join("run/shared")).unwrap();
    assert_same_bytes(
        "shared",
        &found,
        &(0..80).flat_map(record).collect::<Vec<_>>(),
    );
    let left = fs::read_dir(clients[0].join("run/.firn/log")).unwrap();
    let names = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let containers: Vec<String> = names
        .filter(|name| !name.starts_with("host-") && !name.starts_with("turn-"))
        .collect();
    assert_eq!(containers, Vec::<String>::new());
}

/// Addresses of the servers that have logs and indexes of a host.
fn servers_of_logs(backing: &Path, host: &str) -> BTreeSet<String> {
    let mut servers = BTreeSet::new();
    let files = fs::read_dir(backing.join(".firn/log")).unwrap().flatten();
    let dirs = files.filter(|file| file.file_type().unwrap().is_dir());
    for container in dirs.flat_map(|file| fs::read_dir(file.path()).unwrap().flatten()) {
        for entry in fs::read_dir(container.path()).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let is_own = ["d", "i"]
                .iter()
                .any(|kind| name.starts_with(&format!("{kind}-{host}-")));
            if is_own {
                servers.extend(addresses(&entry.path()));
            }
        }
    }
    servers
}

/// Proves S-place-11.
#[test]
fn a_class_or_a_file_system_that_is_not_there_is_refused_at_the_mount() {
    let sandbox = Sandbox::new("moosefs-bad");
    let Some(moosefs) = start(&sandbox) else {
        return;
    };
    let backing = moosefs.point().join("run");
    let refusal = |backing: &Path, options: &str| {
        let point = sandbox.join("mnt");
        let args = mount_args(backing, &point, options);
        run(&mut sandbox.firn(args.iter().map(|arg| -> &OsStr { arg.as_ref() })))
            .code(2)
            .stderr
    };
    let unknown = refusal(&backing, "placement=moosefs,servers=on_A:on_E");
    assert!(
        unknown.contains("placement=moosefs: `mfssetsclass`: "),
        "{unknown}"
    );
    let lustre = refusal(&backing, "placement=lustre,servers=1:2");
    let expected = "placement=lustre: the backing is not on Lustre";
    assert!(lustre.contains(expected), "{lustre}");
    let local = refusal(
        &sandbox.join("backing"),
        "placement=moosefs,servers=on_A:on_B",
    );
    assert!(
        local.contains("placement=moosefs: `mfssetsclass`: "),
        "{local}"
    );
}
