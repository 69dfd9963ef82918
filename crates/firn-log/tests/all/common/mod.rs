//! The disks below the logs of several simulated hosts: one simulated disk, or a primary and lanes.
//!
//! A host that is to crash dies on all of its disks at the same call, whichever disk the call goes to.

#![allow(dead_code, reason = "each test uses a part")]

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Attr, Backing, Errno, Volume};
use firn_hosts::own;
use firn_lanes::{Lane, Lanes, Rule, Setup};
use firn_sim::Fault;
use firn_sim::{SimBacking, suite};

/// Simulated disks, as one process sees them.
pub trait Ground: Sized {
    /// The backing below the logs.
    type Base: Backing;
    fn new() -> Self;
    fn disks(&self) -> Vec<&SimBacking>;
    /// Returns the same disks as another process sees them.
    fn another_process(&self) -> Self;
    /// Returns a copy of the disks in their present state. Later changes of either do not affect the other.
    fn fork(&self) -> Self;
    /// Opens the backing as a host with this name.
    fn open(&self, host: &str) -> Self::Base;
    /// Frees what waits to be removed.
    fn finish_removals(base: &Self::Base);

    /// Makes the process die after `calls` calls.
    fn crash_after(&self, calls: u64) {
        let count = Arc::new(AtomicU64::new(0));
        for disk in self.disks() {
            let count = Arc::clone(&count);
            disk.set_plan(move |_, _| {
                let is_over = count.fetch_add(1, Ordering::Relaxed) + 1 >= calls;
                is_over.then_some(Fault::Crash)
            });
        }
    }

    /// Makes listings that this process sees lag at times, or never again with `None`.
    fn set_listing_lag(&self, seed: Option<u64>) {
        for disk in self.disks() {
            disk.set_listing_lag(seed);
        }
    }

    /// Makes attributes, and look-ups of directories, lag at times.
    fn set_attribute_lag(&self, seed: u64) {
        for disk in self.disks() {
            disk.set_attribute_lag(Some(seed));
        }
    }

    fn is_dead(&self) -> bool {
        self.disks().iter().any(|disk| disk.is_dead())
    }

    /// Ends the process. Its locks are released.
    fn end_process(&self) {
        self.crash_after(0);
        for disk in self.disks() {
            disk.begin_new_process();
        }
    }

    fn power_loss(&self, seed: u64) {
        for (disk, number) in self.disks().into_iter().zip(0..) {
            disk.power_loss(seed.wrapping_mul(31) + number);
        }
    }
}

impl Ground for SimBacking {
    type Base = Self;

    fn new() -> Self {
        Self::new()
    }

    fn disks(&self) -> Vec<&SimBacking> {
        vec![self]
    }

    fn another_process(&self) -> Self {
        self.another_process()
    }

    fn fork(&self) -> Self {
        self.fork()
    }

    fn open(&self, _host: &str) -> Self {
        self.clone()
    }

    fn finish_removals(_base: &Self) {}
}

/// Id of the primary to which files in the lanes belong.
pub const PRIMARY_ID: u128 = 0xf1f0;

/// A primary and two lanes.
pub struct SimLanes {
    pub primary: SimBacking,
    pub lanes: [SimBacking; 2],
}

impl SimLanes {
    /// Returns the path of a lane, for messages.
    fn path(number: usize) -> String {
        format!("/lanes/{number}")
    }

    /// Returns the names of the files in a lane.
    pub fn files_in(&self, lane: usize) -> Vec<String> {
        let disk = &self.lanes[lane];
        let listed = own::list(disk, &disk.root()).expect("list").into_iter();
        listed
            .map(|(name, ..)| String::from_utf8_lossy(&name).into_owned())
            .collect()
    }
}

impl Ground for SimLanes {
    type Base = Lanes<SimBacking>;

    fn new() -> Self {
        Self {
            primary: SimBacking::new(),
            lanes: [SimBacking::new(), SimBacking::new()],
        }
    }

    fn disks(&self) -> Vec<&SimBacking> {
        let [a, b] = &self.lanes;
        vec![&self.primary, a, b]
    }

    fn another_process(&self) -> Self {
        Self {
            primary: self.primary.another_process(),
            lanes: self.lanes.each_ref().map(SimBacking::another_process),
        }
    }

    fn fork(&self) -> Self {
        Self {
            primary: self.primary.fork(),
            lanes: self.lanes.each_ref().map(SimBacking::fork),
        }
    }

    fn open(&self, host: &str) -> Lanes<SimBacking> {
        let primary = &self.primary;
        let staging = firn_lanes::record::open_staging(primary, host).expect("staging");
        let lanes = self.lanes.iter().enumerate();
        let lanes = lanes.map(|(number, lane)| Lane::new(lane.clone(), Self::path(number).into()));
        let setup = Setup {
            id: PRIMARY_ID,
            staging: Some(staging),
            lanes: lanes.collect(),
            absent: Vec::new(),
            rule: Some(Rule::new(self.lanes.len(), host)),
        };
        Lanes::open(primary.clone(), setup).expect("open")
    }

    fn finish_removals(base: &Lanes<SimBacking>) {
        base.finish_removals().expect("remove");
        let orphans = base.find_orphans().expect("walk");
        assert!(orphans.is_empty(), "{orphans:?}");
    }
}

/// Opens the directory of all containers.
pub fn log_dir<B: Backing>(base: &B) -> B::Inode {
    let (firn, _) = base
        .lookup(&base.root(), OsStr::new(own::TOP))
        .expect("lookup");
    base.lookup(&firn, OsStr::new(own::LOGS)).expect("lookup").0
}

/// Returns the directories of logged files, each with the names in it.
pub fn file_dirs<B: Backing>(base: &B) -> Vec<(B::Inode, Vec<String>)> {
    let top = log_dir(base);
    let names = names(base, &top).into_iter();
    let dirs = names.filter(|name| !name.starts_with("turn-")).map(|name| {
        let (dir, _) = base.lookup(&top, OsStr::new(&name)).expect("lookup");
        let inside = self::names(base, &dir);
        (dir, inside)
    });
    dirs.collect()
}

/// Returns the names of all containers and of half-removed ones, and `empty` for each file's directory without one.
pub fn containers<B: Backing>(base: &B) -> Vec<String> {
    let names = file_dirs(base).into_iter().flat_map(|(_, names)| {
        if names.is_empty() {
            vec!["empty".to_owned()]
        } else {
            names
        }
    });
    names.collect()
}

/// Returns the directory of the first logged file, and its first container.
pub fn first_container<B: Backing>(base: &B) -> Option<(B::Inode, B::Inode)> {
    let (parent, names) = file_dirs(base).into_iter().next()?;
    let name = names.first()?;
    let (container, _) = base.lookup(&parent, OsStr::new(name)).expect("lookup");
    Some((parent, container))
}

fn names<B: Backing>(base: &B, dir: &B::Inode) -> Vec<String> {
    let listed = own::list(base, dir).expect("list").into_iter();
    let names = listed.map(|(name, ..)| String::from_utf8_lossy(&name).into_owned());
    names.collect()
}

/// Opens a file and reads all of its bytes. Returns `None` if there is no file with this name.
pub fn read<B: Backing>(backing: &B, name: &str) -> Result<Option<Vec<u8>>, Errno> {
    let Some((bytes, attr)) = read_unchecked(backing, name)? else {
        return Ok(None);
    };
    assert_eq!(
        bytes.len() as u64,
        attr.size,
        "{name}: the length is told right"
    );
    Ok(Some(bytes))
}

/// Opens a file and reads its bytes. Returns them with the attributes that the look-up gave. There may be more bytes
/// than the attributes say.
pub fn read_unchecked<B: Backing>(
    backing: &B,
    name: &str,
) -> Result<Option<(Vec<u8>, Attr)>, Errno> {
    let (inode, attr) = match backing.lookup(&backing.root(), OsStr::new(name)) {
        Err(Errno::NOENT) => return Ok(None),
        found => found?,
    };
    let file = backing.open(&inode, firn_backing::Access::Read)?;
    let mut bytes = vec![0xee; attr.size as usize + 10];
    let count = backing.read_at(&file, &mut bytes, 0)?;
    bytes.truncate(count);
    Ok(Some((bytes, attr)))
}

/// Opens a file for reading and writing, and creates it if it does not exist.
pub fn open_or_create<B: Backing>(backing: &B, name: &str) -> Result<B::File, Errno> {
    let root = backing.root();
    match backing.lookup(&root, OsStr::new(name)) {
        Ok((inode, _)) => backing.open(&inode, firn_backing::Access::ReadWrite),
        Err(Errno::NOENT) => {
            let me = suite::own_caller();
            let made = backing.create(&me, &root, OsStr::new(name), 0o644)?;
            Ok(made.1)
        }
        Err(error) => Err(error),
    }
}
