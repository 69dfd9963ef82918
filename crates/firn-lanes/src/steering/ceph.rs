//! CephFS: extended attributes of a file that has no bytes yet (its "file layouts").
//!
//! Where the objects of a file go within a pool, CRUSH decides; so a lane is a pool. The client must be allowed to set
//! layouts (`p` in its capability).

use std::ffi::{CStr, OsString};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use firn_backing::Result;
use firn_backing::dir::steering::NewFile;
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};

use super::{Created, Driver, Location, create_plain, not_on, open_to_ask};

const STRIPE_COUNT: &CStr = c"ceph.file.layout.stripe_count";
const POOL: &CStr = c"ceph.file.layout.pool";
/// Every directory has it, with the kernel's client as with that in user space.
const ENTRIES: &CStr = c"ceph.dir.entries";
const POOL_BYTES_MAX: usize = 256;

/// Lanes are pools.
#[derive(Debug)]
pub struct Ceph {
    pools: Vec<OsString>,
}

impl Ceph {
    /// For data pools with these names.
    pub fn new(servers: &[OsString]) -> Self {
        Self {
            pools: servers.to_vec(),
        }
    }
}

impl Driver for Ceph {
    fn check(&self, dir: BorrowedFd<'_>) -> std::result::Result<(), String> {
        let no_value: &mut [u8] = &mut [];
        let asked = open_to_ask(dir).and_then(|dir| fgetxattr(dir, ENTRIES, no_value));
        asked.map(drop).map_err(|error| not_on("CephFS", error))
    }

    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created> {
        let file = create_plain(new)?;
        let set = |name, value| fsetxattr(&file, name, value, XattrFlags::empty());
        let wish = set(STRIPE_COUNT, b"1").and_then(|()| set(POOL, self.pools[lane].as_bytes()));
        Ok(Created::from_wish(file, wish))
    }

    fn find_server(&self, file: BorrowedFd<'_>) -> Location {
        let mut name = vec![0; POOL_BYTES_MAX];
        let Ok(len) = fgetxattr(file, POOL, &mut name[..]) else {
            return Location::Unknown;
        };
        name.truncate(len);
        Location::Server(OsString::from_vec(name).to_string_lossy().into_owned())
    }
}
