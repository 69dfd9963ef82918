//! A FUSE server for tests of power failures: it serves a simulated disk, which then loses what was not synced.
//!
//! After a power failure the disk has one of the states that a real disk may have. Of the data and names that no
//! fsync(2) covered, any subset is lost ([`SimBacking::power_loss`]). The kernel sends no syncfs(2) to the server, as
//! it sends none to sshfs and to the clients of most parallel file systems.
//!
//! The server reads commands from standard input, one on each line, and answers each with a line:
//! * `cut SEED` simulates a power failure. The answer is `ready` when the disk is mounted again.
//! * `syncs` is answered with the number of fsync and fsyncdir requests so far.

use std::ffi::OsStr;
use std::io::{self, BufRead};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::Volume;
use firn_sim::SimBacking;
use fuser::{BackgroundSession, Errno, SessionACL};
use rustix::mount::{UnmountFlags, unmount};

use crate::{Caching, Policy, Server, mount_settings};

/// Policy that counts the requests that make data or names durable.
#[derive(Clone, Default)]
struct CountSyncs(Arc<AtomicU64>);

impl Policy<SimBacking> for CountSyncs {
    fn admit(
        &self,
        operation: &'static str,
        _: &<SimBacking as Volume>::Inode,
        _: Option<&OsStr>,
    ) -> Result<(), Errno> {
        if matches!(operation, "fsync" | "fsyncdir") {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Serves an empty simulated disk at `mount_point`, and executes commands from standard input until it ends. Panics at
/// an unknown command.
pub fn serve(mount_point: &Path) -> io::Result<()> {
    let disk = SimBacking::new();
    let syncs = CountSyncs::default();
    let mount = || -> io::Result<BackgroundSession> {
        let server = Server::new(disk.clone(), syncs.clone(), Caching::Nothing)?;
        // One thread: the order of requests is that of the kernel.
        let settings = mount_settings("firn-powerfs", SessionACL::All, 1);
        fuser::spawn_mount(server, mount_point, &settings)
    };
    let mut session = Some(mount()?);
    println!("ready");
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["cut", seed] => {
                let _ = unmount(mount_point, UnmountFlags::DETACH);
                drop(session.take());
                disk.power_loss(seed.parse().expect("a seed"));
                disk.fsck().expect("the disk is whole");
                session = Some(mount()?);
                println!("ready");
            }
            ["syncs"] => println!("{}", syncs.0.load(Ordering::Relaxed)),
            _ => panic!("the server has no command {line:?}"),
        }
    }
    Ok(())
}
