//! Tokens: hosts that share a lane write to it one at a time, and a failed token service delays writes only for a
//! limited time.

use crate::common;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use common::host::{CHUNK_BYTES, Host, LIMIT, until};
use firn_drain::IoThreads;
use firn_hosts::tokens::{
    LockService, QueuePosition, ServiceError, TokenFigures, TokenLimits, TokenReply, TokenState,
    Tokens,
};
use firn_sim::SimBacking;
use parking_lot::{Condvar, Mutex};

/// A time limit that no test reaches.
const NEVER: Duration = Duration::from_secs(600);

/// A token service in memory with one lane. Hosts get the token in the order of their requests.
#[derive(Default)]
struct Service {
    /// The hosts that asked for the token. The first host holds it.
    line: Mutex<VecDeque<usize>>,
}

/// The connection of one host to the service.
struct Member {
    service: Arc<Service>,
    host: usize,
}

impl Service {
    fn holder(&self) -> Option<usize> {
        self.line.lock().front().copied()
    }

    fn remove(&self, host: usize) {
        self.line.lock().retain(|known| *known != host);
    }
}

impl LockService for Member {
    fn ask(&mut self) -> Result<TokenReply, ServiceError> {
        let mut line = self.service.line.lock();
        if !line.contains(&self.host) {
            line.push_back(self.host);
        }
        let holder = line[0];
        if holder == self.host {
            return Ok(TokenReply::Granted);
        }
        Ok(TokenReply::Queued(QueuePosition {
            holder: Some(holder.to_string()),
            holding: holder.to_string(),
            ask_again_after: Duration::from_millis(1),
        }))
    }

    fn give_back(&mut self) -> Result<(), ServiceError> {
        self.service.remove(self.host);
        Ok(())
    }

    fn others_wait(&mut self) -> Result<bool, ServiceError> {
        Ok(self.service.line.lock().len() > 1)
    }

    fn renew(&mut self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn renew_every(&self) -> Option<Duration> {
        None
    }
}

fn tokens(service: impl LockService + 'static, wait: Duration, hold: Duration) -> Option<Tokens> {
    let limits = TokenLimits { hold, wait };
    Some(Tokens::start(vec![Box::new(service)], limits).expect("keepers"))
}

fn member(service: &Arc<Service>, host: usize) -> Member {
    let service = Arc::clone(service);
    Member { service, host }
}

fn figures(host: &Host<SimBacking>) -> TokenFigures {
    let token = host.pool.lane_tokens().first();
    token.expect("the lane has a token").figures()
}

#[test]
fn hosts_that_share_a_lane_write_to_it_one_at_a_time() {
    const HOSTS: usize = 3;
    const FILES: usize = 40;
    let service = Arc::new(Service::default());
    let batches = Arc::new(Mutex::new(Vec::new()));
    let hosts: Vec<_> = (0..HOSTS)
        .map(|number| {
            let backing = SimBacking::new();
            let trace = Arc::clone(&batches);
            let watched = Arc::clone(&service);
            backing.set_plan(move |call, _| {
                if call == "write_at" {
                    assert_eq!(watched.holder(), Some(number), "the writer has the token");
                    let mut trace = trace.lock();
                    if trace.last() != Some(&number) {
                        trace.push(number);
                    }
                }
                None
            });
            let hold = Duration::from_millis(2);
            let tokens = tokens(member(&service, number), NEVER, hold);
            Host::start(backing, IoThreads::new(3), tokens)
        })
        .collect();
    std::thread::scope(|scope| {
        for host in &hosts {
            scope.spawn(move || {
                for file in 0..FILES {
                    let (handle, told) = host.write_awaited(&format!("file_{file}"));
                    assert!(told.recv_timeout(LIMIT).expect("drained"));
                    host.engine.release(handle);
                }
            });
        }
    });
    let batches = batches.lock().len();
    assert!(
        (HOSTS..=HOSTS * FILES).contains(&batches),
        "{batches} batches"
    );
    for host in hosts {
        let figures = figures(&host);
        assert_eq!(figures.went_without, 0, "{figures:?}");
        assert!(figures.granted > 0, "{figures:?}");
        host.end();
    }
    assert_eq!(service.holder(), None, "the token was given up");
}

/// A token service that does not answer.
struct Silent;

impl LockService for Silent {
    fn ask(&mut self) -> Result<TokenReply, ServiceError> {
        let why = "nobody is there".into();
        Err(ServiceError::Lost { why })
    }

    fn give_back(&mut self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn others_wait(&mut self) -> Result<bool, ServiceError> {
        Ok(false)
    }

    fn renew(&mut self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn renew_every(&self) -> Option<Duration> {
        None
    }
}

#[test]
fn without_an_answer_the_drain_goes_on_without_a_token_and_says_so() {
    let tokens = tokens(Silent, Duration::from_millis(20), Duration::from_millis(1));
    let host = Host::start(SimBacking::new(), IoThreads::new(2), tokens);
    let handle = host.write_bytes("file", &vec![1; CHUNK_BYTES as usize]);
    // No caller waits for the file, so the test polls.
    until("the file is drained", || {
        host.engine.figures().held_bytes == 0
    });
    host.engine.release(handle);
    let figures = figures(&host);
    assert_eq!(
        (figures.granted, figures.went_without),
        (0, 1),
        "{figures:?}"
    );
    assert_eq!(
        figures.last_error.as_deref(),
        Some("the token was lost: nobody is there")
    );
    host.end();
}

#[test]
fn behind_a_host_that_is_dead_work_waits_for_token_wait_and_no_longer() {
    let service = Arc::new(Service::default());
    service.line.lock().push_back(7);
    let backing = SimBacking::new();
    let wait = Duration::from_millis(200);
    let tokens = tokens(member(&service, 0), wait, Duration::from_millis(1));
    let host = Host::start(backing.clone(), IoThreads::new(2), tokens);
    let hang = backing.hang("write_at");
    let (first, told_first) = host.write_awaited("first");
    until("it waits", || service.line.lock().len() == 2);
    hang.await_call();
    assert_eq!(service.holder(), Some(7), "its lease has not ended");
    let without = figures(&host);
    assert_eq!(without.state, TokenState::Without);
    assert_eq!(
        (without.granted, without.went_without),
        (0, 1),
        "{without:?}"
    );
    // The lease of the dead host ends.
    service.remove(7);
    let mut number = 0;
    until("the token is used again", || {
        number += 1;
        let (handle, told) = host.write_awaited(&number.to_string());
        assert!(told.recv_timeout(LIMIT).expect("drained"));
        host.engine.release(handle);
        figures(&host).granted > 0
    });
    hang.release();
    assert!(told_first.recv_timeout(LIMIT).expect("drained"));
    host.engine.release(first);
    until("the token is given back", || service.holder().is_none());
    host.end();
}

/// Blocks the calls of a service until `is_free` is set.
struct Stuck {
    is_free: Mutex<bool>,
    freed: Condvar,
}

struct StuckService(Arc<Stuck>);

impl StuckService {
    fn wait(&self) {
        let mut is_free = self.0.is_free.lock();
        self.0.freed.wait_while(&mut is_free, |is_free| !*is_free);
    }
}

impl LockService for StuckService {
    fn ask(&mut self) -> Result<TokenReply, ServiceError> {
        self.wait();
        Ok(TokenReply::Granted)
    }

    fn give_back(&mut self) -> Result<(), ServiceError> {
        self.wait();
        Ok(())
    }

    fn others_wait(&mut self) -> Result<bool, ServiceError> {
        Ok(false)
    }

    fn renew(&mut self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn renew_every(&self) -> Option<Duration> {
        None
    }
}

#[test]
fn a_call_of_the_service_that_does_not_return_stops_no_drain() {
    let stuck = Arc::new(Stuck {
        is_free: Mutex::new(false),
        freed: Condvar::new(),
    });
    let service = StuckService(Arc::clone(&stuck));
    let tokens = tokens(service, Duration::from_millis(10), Duration::from_millis(1));
    let host = Host::start(SimBacking::new(), IoThreads::new(2), tokens);
    for name in ["one", "two"] {
        let (handle, told) = host.write_awaited(name);
        assert!(told.recv_timeout(LIMIT).expect("drained"));
        host.engine.release(handle);
    }
    assert_eq!(figures(&host).granted, 0);
    *stuck.is_free.lock() = true;
    stuck.freed.notify_all();
    host.end();
}
