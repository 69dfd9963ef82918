#![allow(dead_code, reason = "no test file uses all of it")]
//! Hosts that take turns: each has a token of one lane and a thread that writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use firn_hosts::tokens::{
    LaneToken, LockService, Permit, TokenFigures, TokenLimits, TokenState, TokenUse, Tokens,
};
use parking_lot::{Condvar, Mutex};

/// Longer than any step of these tests; only a hang takes this long.
pub const HANGS_AFTER: Duration = Duration::from_secs(60);

/// Returns token limits. Short limits let a test see many batches.
pub fn limits(hold_ms: u64, wait_ms: u64) -> TokenLimits {
    TokenLimits {
        hold: Duration::from_millis(hold_ms),
        wait: Duration::from_millis(wait_ms),
    }
}

/// One host with one lane.
pub struct Host {
    tokens: Tokens,
    woken: Arc<(Mutex<u64>, Condvar)>,
}

impl Host {
    pub fn start(service: Box<dyn LockService>, limits: TokenLimits) -> Self {
        let tokens = Tokens::start(vec![service], limits).expect("a thread");
        let woken = Arc::new((Mutex::new(0), Condvar::new()));
        let waker = Arc::clone(&woken);
        let wake = move || {
            *waker.0.lock() += 1;
            waker.1.notify_all();
        };
        tokens.lane(0).expect("a lane").set_waker(Box::new(wake));
        Self { tokens, woken }
    }

    pub fn token(&self) -> &LaneToken {
        self.tokens.lane(0).expect("a lane")
    }

    pub fn figures(&self) -> TokenFigures {
        self.token().figures()
    }

    /// Waits until this host may write.
    pub fn enter(&self) -> TokenUse {
        let began = Instant::now();
        loop {
            let wakes = *self.woken.0.lock();
            match self.token().enter() {
                Permit::Go(used) => return used,
                Permit::Wait(time) => {
                    assert!(began.elapsed() < HANGS_AFTER, "{:?}", self.figures());
                    let mut count = self.woken.0.lock();
                    if *count == wakes {
                        self.woken.1.wait_for(&mut count, time);
                    }
                }
            }
        }
    }

    pub fn stop_within(&self, patience: Duration) {
        self.tokens.stop_within(patience);
    }
}

/// Counts concurrent writers.
#[derive(Default)]
pub struct Server {
    writers: AtomicUsize,
    writers_max: AtomicUsize,
}

impl Server {
    pub fn write(&self, host: &Host, time: Duration) -> bool {
        let used = host.enter();
        let has_token = used.has_token();
        let writers = 1 + self.writers.fetch_add(1, Ordering::SeqCst);
        self.writers_max.fetch_max(writers, Ordering::SeqCst);
        std::thread::sleep(time);
        self.writers.fetch_sub(1, Ordering::SeqCst);
        host.token().leave(used);
        has_token
    }

    pub fn writers_max(&self) -> usize {
        self.writers_max.load(Ordering::SeqCst)
    }
}

/// Lets all hosts write `writes` times each, at the same time. Returns the maximum number of concurrent writers, and
/// whether every write had the token.
pub fn write_together(hosts: &[Host], writes: usize, time: Duration) -> (usize, bool) {
    let server = Server::default();
    let with_token = std::thread::scope(|scope| {
        let server = &server;
        let one = |host| move || (0..writes).all(|_| server.write(host, time));
        let threads: Vec<_> = hosts.iter().map(|host| scope.spawn(one(host))).collect();
        threads
            .into_iter()
            .all(|thread| thread.join().expect("a host"))
    });
    (server.writers_max(), with_token)
}

pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < HANGS_AFTER, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn wait_for_state(host: &Host, state: TokenState) {
    wait_until(&format!("{state:?}"), || host.figures().state == state);
}
