//! A model of a network file system: each request costs a round trip, and all data shares one link.
//!
//! It is for demonstrations and for tests that need a slow backing without a network and without root. No figure that
//! was taken with it is one of a server.
//!
//! | assumption | [`Speed::NFS`] | source |
//! |---|---|---|
//! | a request, whatever it is about, is answered after a round trip | 1.6 ms | lowest latency of a write that Amazon gives for EFS One Zone, an NFS service; Regional: 2.7 ms ("Amazon EFS performance specifications") |
//! | data of all requests share the link of one client | 500 MiB/s | the same page, limit of a client with provisioned or bursting throughput |
//! | write(2) returns when the server has answered | always | nfs(5), "The sync mount option" |
//! | names and attributes are known for a second, data that was read while its file is open | – | as with [`Caching::Usual`] |
//!
//! Not modelled: the disk behind the server, locks between clients, and a client that gathers writes until close, as an
//! NFS mount without `sync` does. Such a client has fewer round trips, and its close waits for the data.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_backing::{Backing, DirBacking};
use fuser::{Errno, SessionACL};
use parking_lot::Mutex;

use crate::{Caching, Policy, Server, Transfer, mount_settings};

/// Requests that are served at a time: more than the writers of a demonstration and the I/O threads of firnd together.
const THREAD_COUNT: usize = 32;

/// How slow the file system is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// Until a request is answered.
    pub round_trip: Duration,
    /// Bytes of all requests together.
    pub bytes_per_s: u64,
}

impl Speed {
    /// See the module.
    pub const NFS: Self = Self {
        round_trip: Duration::from_micros(1600),
        bytes_per_s: 500 << 20,
    };
}

/// Lets requests take the time that a [`Speed`] says.
pub struct Network {
    speed: Speed,
    /// When the link has carried all that was given to it.
    link_free_at: Mutex<Instant>,
}

impl Network {
    /// Nothing is under way.
    pub fn new(speed: Speed) -> Self {
        Self {
            speed,
            link_free_at: Mutex::new(Instant::now()),
        }
    }

    /// When the link has carried `len` bytes that are given to it at `now`.
    fn reserve_link(&self, len: u64, now: Instant) -> Instant {
        let time = Duration::from_secs_f64(len as f64 / self.speed.bytes_per_s as f64);
        let mut free_at = self.link_free_at.lock();
        *free_at = (*free_at).max(now) + time;
        *free_at
    }
}

impl<B: Backing> Policy<B> for Network {
    fn admit(&self, _: &'static str, _: &B::Inode, _: Option<&OsStr>) -> Result<(), Errno> {
        std::thread::sleep(self.speed.round_trip);
        Ok(())
    }

    fn transfer(&self, _: u64, transfer: Transfer) {
        let (Transfer::Read(range) | Transfer::Write(range)) = transfer else {
            return;
        };
        let now = Instant::now();
        let done = self.reserve_link(range.end - range.start, now);
        std::thread::sleep(done.saturating_duration_since(now));
    }
}

/// Serves `source` at `mount_point` until that is unmounted.
pub fn serve(source: &Path, mount_point: &Path, speed: Speed) -> io::Result<()> {
    rustix::process::umask(rustix::fs::Mode::empty());
    let backing = DirBacking::open(source)?;
    let server = Server::new(backing, Network::new(speed), Caching::Usual)?;
    let settings = mount_settings("firn-slowfs", SessionACL::Owner, THREAD_COUNT);
    fuser::mount(server, mount_point, &settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_share_the_link() {
        let network = Network::new(Speed {
            round_trip: Duration::ZERO,
            bytes_per_s: 1 << 20,
        });
        let now = Instant::now() + Duration::from_secs(1);
        let times = [1 << 20, 1 << 19, 0].map(|len| {
            let done = network.reserve_link(len, now);
            done.saturating_duration_since(now).as_millis()
        });
        assert_eq!(times, [1000, 1500, 1500]);
    }

    #[test]
    fn a_link_that_was_idle_does_not_catch_up() {
        let network = Network::new(Speed {
            round_trip: Duration::ZERO,
            bytes_per_s: 1 << 20,
        });
        let first = network.reserve_link(1, Instant::now());
        let later = first + Duration::from_secs(60);
        assert_eq!(
            network.reserve_link(1 << 20, later),
            later + Duration::from_secs(1)
        );
    }
}
