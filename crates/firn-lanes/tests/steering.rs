//! Tests of placement on one file system: which calls each driver makes.
//!
//! A FUSE server stands in for Lustre and other file systems. It records the calls that reach it through the kernel,
//! and refuses those that a test names. The example programs for a site run with fakes of the tools that they call. The
//! tests need FUSE (`/dev/fuse` and the right to mount).

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use firn_backing::dir::steering::Steering;
use firn_backing::{Backing, Caller, DirBacking, Errno, LaneIndex, Placement, Volume};
use firn_lanes::Rule;
use firn_lanes::steering::{Driver, Location, Lustre, ProgramOfSite, Staged, SteeredPlacement};
use fuser::{
    BackgroundSession, Config, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyXattr, Request,
};

const TTL: Duration = Duration::ZERO;

/// The calls that the server refuses.
#[derive(Clone, Copy, Default)]
struct Refuses {
    xattrs: bool,
    rename_flags: bool,
    links: bool,
}

/// A file or directory of the server.
#[derive(Clone)]
struct Node {
    /// Each name of the node: the number of its directory, and the name in it.
    names: Vec<(u64, OsString)>,
    mode: u32,
    is_dir: bool,
}

/// The state of the server: its files, their attributes, and the calls that it received.
#[derive(Default)]
struct SteeredState {
    nodes: BTreeMap<u64, Node>,
    xattrs: HashMap<(u64, OsString), Vec<u8>>,
    /// The calls that create or name a file or set an attribute, in order.
    calls: Vec<String>,
}

/// The FUSE server.
struct Recorder {
    state: Arc<Mutex<SteeredState>>,
    refuses: Refuses,
    next: AtomicU64,
}

impl SteeredState {
    fn find(&self, parent: u64, name: &OsStr) -> Option<u64> {
        let name = (parent, name.to_owned());
        let mut nodes = self.nodes.iter();
        nodes.find_map(|(&number, node)| node.names.contains(&name).then_some(number))
    }

    fn attr(&self, number: u64) -> Option<FileAttr> {
        let node = self.nodes.get(&number)?;
        Some(FileAttr {
            ino: INodeNo(number),
            size: 0,
            blocks: 0,
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind: if node.is_dir {
                FileType::Directory
            } else {
                FileType::RegularFile
            },
            perm: (node.mode & 0o7777) as u16,
            nlink: node.names.len() as u32,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn add(&mut self, number: u64, parent: u64, name: &OsStr, mode: u32, is_dir: bool) {
        let node = Node {
            names: vec![(parent, name.to_owned())],
            mode,
            is_dir,
        };
        self.nodes.insert(number, node);
    }

    /// Returns a name as `calls` shows it. Names in staging directories are random, so `*` stands for them.
    fn display_name(&self, parent: u64, name: &OsStr) -> String {
        match self.nodes.get(&parent) {
            Some(dir) if dir.names[0].1.to_string_lossy().starts_with("lane") => {
                format!("{}/*", dir.names[0].1.display())
            }
            _ => name.to_string_lossy().into_owned(),
        }
    }

    fn name_of(&self, number: u64) -> String {
        let (parent, name) = &self.nodes[&number].names[0];
        self.display_name(*parent, name)
    }
}

impl Recorder {
    fn make(&self, parent: INodeNo, name: &OsStr, mode: u32) -> Result<u64, fuser::Errno> {
        let mut state = self.state.lock().unwrap();
        if state.find(parent.0, name).is_some() {
            return Err(fuser::Errno::EEXIST);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        state.add(number, parent.0, name, mode, false);
        Ok(number)
    }
}

impl Filesystem for Recorder {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let state = self.state.lock().unwrap();
        let attr = state.find(parent.0, name).and_then(|ino| state.attr(ino));
        match attr {
            Some(attr) => reply.entry(&TTL, &attr, Generation(0)),
            None => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.state.lock().unwrap().attr(ino.0) {
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let number = match self.make(parent, name, mode) {
            Ok(number) => number,
            Err(error) => return reply.error(error),
        };
        let mut state = self.state.lock().unwrap();
        // O_LOV_DELAY_CREATE has a second flag, O_NOCTTY, which the kernel does not pass to FUSE servers.
        let delayed = if flags & libc::O_ASYNC != 0 {
            " delayed"
        } else {
            ""
        };
        let line = format!("create {}{delayed}", state.display_name(parent.0, name));
        state.calls.push(line);
        let attr = state.attr(number).unwrap();
        reply.created(
            &TTL,
            &attr,
            Generation(0),
            FileHandle(0),
            FopenFlags::empty(),
        );
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn setxattr(
        &self,
        _: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        _: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        if self.refuses.xattrs {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        }
        let mut state = self.state.lock().unwrap();
        let line = format!(
            "setxattr {} {} {}",
            state.name_of(ino.0),
            name.to_string_lossy(),
            value.escape_ascii()
        );
        state.calls.push(line);
        state
            .xattrs
            .insert((ino.0, name.to_owned()), value.to_vec());
        reply.ok();
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let state = self.state.lock().unwrap();
        match state.xattrs.get(&(ino.0, name.to_owned())) {
            Some(value) if size == 0 => reply.size(value.len() as u32),
            Some(value) if value.len() <= size as usize => reply.data(value),
            Some(_) => reply.error(fuser::Errno::ERANGE),
            None => reply.error(fuser::Errno::ENODATA),
        }
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let no_replace = flags.contains(RenameFlags::RENAME_NOREPLACE);
        if no_replace && self.refuses.rename_flags {
            return reply.error(fuser::Errno::EINVAL);
        }
        let mut state = self.state.lock().unwrap();
        let Some(number) = state.find(parent.0, name) else {
            return reply.error(fuser::Errno::ENOENT);
        };
        let line = format!(
            "rename {} to {}",
            state.display_name(parent.0, name),
            state.display_name(new_parent.0, new_name)
        );
        state.calls.push(line);
        match state.find(new_parent.0, new_name) {
            Some(_) if no_replace => return reply.error(fuser::Errno::EEXIST),
            Some(old) => state.nodes.get_mut(&old).unwrap().names.clear(),
            None => {}
        }
        let node = state.nodes.get_mut(&number).unwrap();
        node.names = vec![(new_parent.0, new_name.to_owned())];
        reply.ok();
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if self.refuses.links {
            return reply.error(fuser::Errno::EPERM);
        }
        let mut state = self.state.lock().unwrap();
        if state.find(parent.0, name).is_some() {
            return reply.error(fuser::Errno::EEXIST);
        }
        let line = format!("link {} as {}", state.name_of(ino.0), name.display());
        state.calls.push(line);
        let node = state.nodes.get_mut(&ino.0).unwrap();
        node.names.push((parent.0, name.to_owned()));
        let attr = state.attr(ino.0).unwrap();
        reply.entry(&TTL, &attr, Generation(0));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut state = self.state.lock().unwrap();
        let line = format!("unlink {}", state.display_name(parent.0, name));
        state.calls.push(line);
        if let Some(number) = state.find(parent.0, name) {
            let node = state.nodes.get_mut(&number).unwrap();
            node.names
                .retain(|held| *held != (parent.0, name.to_owned()));
        }
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let state = self.state.lock().unwrap();
        let mut entries: Vec<(u64, FileType, OsString)> = vec![
            (ino.0, FileType::Directory, ".".into()),
            (1, FileType::Directory, "..".into()),
        ];
        for (&number, node) in &state.nodes {
            let inside = node.names.iter().filter(|(parent, _)| *parent == ino.0);
            entries.extend(inside.map(|(_, name)| (number, FileType::RegularFile, name.clone())));
        }
        for (at, (number, kind, name)) in entries.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(*number), at as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

/// A mounted server.
struct Mounted {
    state: Arc<Mutex<SteeredState>>,
    /// Declared before `dir`, so that the session ends before its mount point is removed.
    _session: BackgroundSession,
    dir: tempfile::TempDir,
}

impl Mounted {
    fn new(refuses: Refuses) -> Self {
        let mut state = SteeredState::default();
        state.add(1, 0, OsStr::new(""), 0o755, true);
        for lane in 0..2u64 {
            let name = format!("lane{lane}");
            state.add(10 + lane, 1, OsStr::new(&name), 0o700, true);
        }
        let state = Arc::new(Mutex::new(state));
        let server = Recorder {
            state: Arc::clone(&state),
            refuses,
            next: AtomicU64::new(100),
        };
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("recorder".into())];
        let session = fuser::spawn_mount(server, dir.path(), &config).expect(
            "this test mounts a FUSE file system: it needs /dev/fuse and the right to mount",
        );
        Self {
            state,
            dir,
            _session: session,
        }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn open_dir(&self, name: &str) -> OwnedFd {
        File::open(self.path().join(name)).unwrap().into()
    }

    /// Returns the calls since the last call of this function.
    fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().calls)
    }

    /// Returns a backing whose files are steered to two lanes.
    fn backing(&self, driver: impl Driver + 'static) -> (DirBacking, Arc<SteeredPlacement>) {
        let servers = vec!["0".into(), "1".into()];
        let rule = Rule::new(2, "host");
        let steered = Arc::new(SteeredPlacement::new(Box::new(driver), servers, rule));
        let steering: Arc<dyn Steering> = steered.clone();
        let backing = DirBacking::open(self.path())
            .unwrap()
            .with_steering(steering);
        (backing, steered)
    }
}

fn create(backing: &DirBacking, name: &str) -> Result<LaneIndex, Errno> {
    let caller = Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        pid: std::process::id(),
    };
    let made = backing.create(&caller, &backing.root(), OsStr::new(name), 0o640)?;
    Ok(backing.facts(&made.0).lane)
}

fn servers(names: &[&str]) -> Vec<OsString> {
    names.iter().map(|&name| name.into()).collect()
}

#[test]
fn lustre_gets_a_layout_before_the_file_has_objects() {
    let mounted = Mounted::new(Refuses::default());
    let (backing, steered) = mounted.backing(Lustre::new(&servers(&["4", "9"])).unwrap());
    assert_eq!(create(&backing, "rank_1").unwrap(), LaneIndex::new(1));
    let zeros = "\\x00".repeat(20);
    assert_eq!(
        mounted.take_calls(),
        [
            "create rank_1 delayed".to_owned(),
            format!(
                "setxattr rank_1 lustre.lov \\xd0\\x0b\\xd1\\x0b\\x01\\x00\\x00\\x00{zeros}\\x01\\x00\\t\\x00"
            ),
        ]
    );
    let files: Vec<u64> = steered.figures().iter().map(|lane| lane.files).collect();
    assert_eq!((files, steered.refused_files()), (vec![0, 1], 0));
    assert_eq!(create(&backing, "rank_1").unwrap_err(), Errno::EXIST);
}

#[test]
fn a_refused_wish_is_counted_and_the_file_is_there() {
    let refuses = Refuses {
        xattrs: true,
        ..Refuses::default()
    };
    let mounted = Mounted::new(refuses);
    let driver = Lustre::new(&servers(&["4", "9"])).unwrap();
    let (backing, steered) = mounted.backing(driver);
    assert_eq!(create(&backing, "a1").unwrap(), LaneIndex::new(1));
    assert_eq!(steered.refused_files(), 1);
    assert!(fs::metadata(mounted.path().join("a1")).unwrap().is_file());
}

fn staged(mounted: &Mounted) -> Staged {
    let dirs = vec![mounted.open_dir("lane0"), mounted.open_dir("lane1")];
    Staged::new(dirs, |_| Location::Unknown).unwrap()
}

#[test]
fn a_staged_file_gets_its_name_whatever_the_file_system_can_do() {
    let with_links = Refuses {
        rename_flags: true,
        ..Refuses::default()
    };
    let without_links = Refuses {
        links: true,
        ..with_links
    };
    let cases: [(Refuses, &[&str]); 3] = [
        (
            Refuses::default(),
            &["create lane1/*", "rename lane1/* to rank_5"],
        ),
        (
            with_links,
            &["create lane1/*", "link lane1/* as rank_5", "unlink lane1/*"],
        ),
        (
            without_links,
            &[
                "create lane1/*",
                "create rank_5",
                "rename lane1/* to rank_5",
            ],
        ),
    ];
    for (refuses, expected) in cases {
        let mounted = Mounted::new(refuses);
        let (backing, steered) = mounted.backing(staged(&mounted));
        assert_eq!(create(&backing, "rank_5").unwrap(), LaneIndex::new(1));
        assert_eq!(mounted.take_calls(), expected);
        let metadata = fs::metadata(mounted.path().join("rank_5")).expect(expected[1]);
        assert_eq!(metadata.mode() & 0o7777, 0o640);
        assert_eq!(steered.refused_files(), 0);
        assert_eq!(create(&backing, "rank_5").unwrap_err(), Errno::EXIST);
        let left = fs::read_dir(mounted.path().join("lane1")).unwrap().count();
        assert_eq!(left, 0, "what could not get its name is removed");
    }
}

#[test]
fn what_a_crash_left_in_a_staging_directory_is_removed() {
    let mounted = Mounted::new(Refuses::default());
    drop(File::create(mounted.path().join("lane1/0123456789abcdef")).unwrap());
    drop(staged(&mounted));
    assert_eq!(
        fs::read_dir(mounted.path().join("lane1")).unwrap().count(),
        0
    );
}

/// Returns a site's program, as a shell script.
fn script(dir: &Path, text: &str) -> OsString {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("place");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.into()
}

fn program(dir: &Path, text: &str) -> (DirBacking, Arc<SteeredPlacement>) {
    program_for(dir, text, &["fast", "slow"])
}

fn program_for(dir: &Path, text: &str, lanes: &[&str]) -> (DirBacking, Arc<SteeredPlacement>) {
    let names = servers(lanes);
    let driver = ProgramOfSite::new(script(dir, text), &names);
    let steered = Arc::new(SteeredPlacement::new(
        Box::new(driver),
        names,
        Rule::new(2, "host"),
    ));
    let steering: Arc<dyn Steering> = steered.clone();
    let top = dir.join("top");
    fs::create_dir(&top).unwrap();
    (
        DirBacking::open(top).unwrap().with_steering(steering),
        steered,
    )
}

#[test]
fn a_program_makes_the_file_in_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (backing, steered) = program(
        dir.path(),
        r#"set -C; umask 077; echo "$1" > "$2/../log"; : > "$2/$3""#,
    );
    assert_eq!(create(&backing, "rank_7").unwrap(), LaneIndex::new(1));
    assert_eq!(
        fs::read_to_string(dir.path().join("log")).unwrap(),
        "slow\n"
    );
    assert_eq!(steered.refused_files(), 0);
    let metadata = fs::metadata(dir.path().join("top/rank_7")).unwrap();
    assert_eq!(metadata.mode() & 0o7777, 0o640);
    assert_eq!(create(&backing, "rank_7").unwrap_err(), Errno::EXIST);
}

#[test]
fn a_program_that_fails_or_does_something_else_costs_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let (backing, steered) = program(dir.path(), "yes no | head -c 1000000 >&2; exit 3");
    create(&backing, "a").unwrap();
    assert_eq!(steered.refused_files(), 1);
    assert!(dir.path().join("top/a").is_file());

    let dir = tempfile::tempdir().unwrap();
    let (backing, _) = program(dir.path(), r#"mkdir "$2/$3""#);
    assert_eq!(create(&backing, "a").unwrap_err(), Errno::IO);
    let (backing, _) = {
        let dir = dir.path().join("second");
        fs::create_dir(&dir).unwrap();
        program(&dir, r#"echo bytes > "$2/$3""#)
    };
    assert_eq!(create(&backing, "a").unwrap_err(), Errno::IO);
}

/// Returns one of the examples, with a fake of the tool that it calls. The fake writes its name and arguments to
/// `DIR/log`, then does what `fake` says.
fn example(
    dir: &Path,
    name: &str,
    tool: &str,
    fake: &str,
    lanes: &[&str],
) -> (DirBacking, Arc<SteeredPlacement>) {
    let tools = dir.join("tools");
    fs::create_dir(&tools).unwrap();
    let log = dir.join("log");
    let recorded = format!("echo {tool} \"$@\" >> {}\n{fake}", log.display());
    fs::rename(script(dir, &recorded), tools.join(tool)).unwrap();
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/placement");
    let run = format!(
        "PATH={}:$PATH FIRN_PLACE_STAGING={} exec {} \"$@\"",
        tools.display(),
        dir.join("staging").display(),
        examples.join(name).display(),
    );
    program_for(dir, &run, lanes)
}

fn log_of(dir: &Path) -> String {
    let log = dir.join("log");
    let text = fs::read_to_string(&log).unwrap_or_default();
    let _ = fs::remove_file(log);
    text
}

/// Asserts that a program created a file on a server: the file counts as steered, has its mode, and its name cannot be
/// created again.
fn assert_made(dir: &Path, backing: &DirBacking, steered: &SteeredPlacement, name: &str) {
    assert_eq!(create(backing, name).unwrap(), LaneIndex::new(1));
    assert_eq!(steered.refused_files(), 0);
    let metadata = fs::metadata(dir.join("top").join(name)).unwrap();
    assert_eq!(metadata.mode() & 0o7777, 0o640);
    assert_eq!(create(backing, name).unwrap_err(), Errno::EXIST);
}

#[test]
fn the_example_for_cephfs_sets_stripe_count_and_pool() {
    let dir = tempfile::tempdir().unwrap();
    let pools = ["pool_a", "0x62"];
    let (backing, steered) = example(dir.path(), "ceph", "setfattr", "", &pools);
    assert_made(dir.path(), &backing, &steered, "rank_1");
    assert_eq!(
        log_of(dir.path()),
        "setfattr -n ceph.file.layout.stripe_count -v \"1\" ./rank_1\n\
         setfattr -n ceph.file.layout.pool -v \"0x62\" ./rank_1\n"
    );
}

#[test]
fn the_example_for_cephfs_leaves_no_file_where_a_layout_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let fake = "echo Operation not supported >&2; exit 1";
    let (backing, steered) = example(dir.path(), "ceph", "setfattr", fake, &["a", "b"]);
    create(&backing, "rank_1").unwrap();
    assert_eq!(steered.refused_files(), 1);
    assert!(dir.path().join("top/rank_1").is_file());
}

#[test]
fn the_example_for_beegfs_makes_the_file_by_its_tool() {
    let dir = tempfile::tempdir().unwrap();
    let fake = r#"for path; do :; done; umask 077; : > "$path""#;
    let targets = ["201", "203"];
    let (backing, steered) = example(dir.path(), "beegfs", "beegfs-ctl", fake, &targets);
    assert_made(dir.path(), &backing, &steered, "rank_1");
    assert_eq!(
        log_of(dir.path()),
        "beegfs-ctl --createfile --numtargets=1 --targets=203 --access=0600 ./rank_1\n"
    );
}

#[test]
fn the_example_for_beegfs_takes_numbers_of_targets_only() {
    let dir = tempfile::tempdir().unwrap();
    let (backing, steered) = example(dir.path(), "beegfs", "beegfs-ctl", "", &["1", "0"]);
    create(&backing, "rank_1").unwrap();
    assert_eq!(
        (steered.refused_files(), log_of(dir.path())),
        (1, String::new())
    );
}

#[test]
fn the_example_for_orangefs_makes_the_file_in_a_directory_with_hints() {
    for ln in ["", "exit 1"] {
        let dir = tempfile::tempdir().unwrap();
        let (backing, steered) = example(dir.path(), "orangefs", "setfattr", "", &["0", "3"]);
        let prepared = Command::new(dir.path().join("place"))
            .args(["--prepare", "0", "3"])
            .status()
            .unwrap();
        assert!(prepared.success());
        let staging = dir.path().join("staging/3");
        let log = log_of(dir.path());
        for hint in [
            "num_dfiles -v \"1\"",
            "layout -v \"4\"",
            "server_list -v \"1:3\"",
        ] {
            let line = format!("setfattr -n user.pvfs2.{hint} {}\n", staging.display());
            assert!(log.contains(&line), "{log}");
        }
        if !ln.is_empty() {
            // The fake of ln(1) stands for a file system without links.
            fs::rename(
                script(&dir.path().join("tools"), ln),
                dir.path().join("tools/ln"),
            )
            .unwrap();
        }
        assert_made(dir.path(), &backing, &steered, "rank_1");
        assert_eq!(fs::read_dir(&staging).unwrap().count(), 0);
    }
}
