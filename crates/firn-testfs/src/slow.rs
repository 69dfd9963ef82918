//! A model of a network file system: each request costs a round trip, and all data shares one link.
//!
//! It is for demonstrations and for tests that need a slow backing without a network and without root. Figures that are
//! measured with it say nothing about a real server.
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

/// Threads of the server: more than the writers of a demonstration and the I/O threads of firnd together.
const THREAD_COUNT: usize = 32;

/// How slow the file system is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// Time until a request is answered.
    pub round_trip: Duration,
    /// Rate of the link, which the data of all requests share.
    pub bytes_per_s: u64,
}

impl Speed {
    /// The speed of an NFS service (table at the head of this file).
    pub const NFS: Self = Self {
        round_trip: Duration::from_micros(1600),
        bytes_per_s: 500 << 20,
    };
}

/// Policy that delays each request as a network of this [`Speed`] would.
pub struct Network {
    speed: Speed,
    /// Time at which the link will have transferred all bytes that it has accepted.
    link_free_at: Mutex<Instant>,
}

impl Network {
    /// Returns a network with an idle link.
    pub fn new(speed: Speed) -> Self {
        Self {
            speed,
            link_free_at: Mutex::new(Instant::now()),
        }
    }

    /// Reserves the link for `len` bytes, behind all earlier transfers. Returns when they will be transferred.
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

    /// Waits until the shared link has transferred the bytes. A sync or a close transfers none.
    fn transfer(&self, _: u64, transfer: Transfer) {
        let (Transfer::Read(range) | Transfer::Write(range)) = transfer else {
            return;
        };
        let now = Instant::now();
        let done = self.reserve_link(range.end - range.start, now);
        std::thread::sleep(done.saturating_duration_since(now));
    }
}

/// Serves the directory `source` at `mount_point`, with this speed, until it is unmounted.
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
