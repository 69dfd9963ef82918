//! What the logs of several hosts lie on: one simulated disk, or a primary and lanes of which each is one.
//!
//! A host dies on all of them at the same call, whichever of them that call is to.

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
    /// What logs are put over.
    type Base: Backing;
    fn new() -> Self;
    fn disks(&self) -> Vec<&SimBacking>;
    /// The same disks, as another process has them.
    fn another_process(&self) -> Self;
    /// The same as they are now, and another world from here on.
    fn fork(&self) -> Self;
    /// As the host of this name has them.
    fn open(&self, host: &str) -> Self::Base;
    /// Frees what only waits to be removed.
    fn finish_removals(base: &Self::Base);

    /// The process dies after `calls` calls.
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

    /// Listings that this process sees are old ones now and then, or all are read anew.
    fn set_listing_lag(&self, seed: Option<u64>) {
        for disk in self.disks() {
            disk.set_listing_lag(seed);
        }
    }

    /// The same of attributes, and of names of directories.
    fn set_attribute_lag(&self, seed: u64) {
        for disk in self.disks() {
            disk.set_attribute_lag(Some(seed));
        }
    }

    fn is_dead(&self) -> bool {
        self.disks().iter().any(|disk| disk.is_dead())
    }

    /// It is dead, and its locks are free.
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

/// Which primary files in the lanes belong to.
pub const PRIMARY_ID: u128 = 0xf1f0;

/// A primary and two lanes.
pub struct SimLanes {
    pub primary: SimBacking,
    pub lanes: [SimBacking; 2],
}

impl SimLanes {
    /// The lane of this number without Firn.
    fn path(number: usize) -> String {
        format!("/lanes/{number}")
    }

    /// Names of files in a lane.
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

/// The directory of all containers.
pub fn log_dir<B: Backing>(base: &B) -> B::Inode {
    let (firn, _) = base
        .lookup(&base.root(), OsStr::new(own::TOP))
        .expect("lookup");
    base.lookup(&firn, OsStr::new(own::LOGS)).expect("lookup").0
}

/// Directories of files, and what is in each of them.
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

/// Containers of all files, what is left of removed ones, and `empty` for each directory of a file that has none.
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

/// The first container, and the directory that it is in.
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

/// All bytes of a file, opened anew; none if there is none of that name.
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

/// Bytes of a file, opened anew, and the attributes that its name had: more bytes than those say, where there are more.
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

/// Opens a file for reading and writing, made if it is not there.
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
