//! Reads between two endpoints of this machine, by software providers of libfabric.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_agent::ofi::{Buffer, Endpoint, Library, Memory, OfiError, Pool, Region, RemoteRegion};

const BUFFER: usize = 1 << 20;
const TEST_TIMEOUT: Duration = Duration::from_secs(30);
const STALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Providers of Debian's libfabric that need no device.
const PROVIDERS: [&str; 2] = ["tcp;ofi_rxm", "shm"];

/// Value of the byte at an index of the exposed memory.
fn byte(index: usize) -> u8 {
    (index % 251) as u8
}

struct Bytes(Vec<u8>);

// SAFETY: the vector is never changed, so its bytes stay at their address.
unsafe impl Memory for Bytes {
    fn start(&self) -> *const u8 {
        self.0.as_ptr()
    }

    fn bytes(&self) -> usize {
        self.0.len()
    }
}

/// An endpoint that exposes memory. A thread serves its reads until the value is dropped.
struct Host {
    region: Region,
    address: Vec<u8>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Host {
    fn start(provider: &str, bytes: usize) -> Self {
        let local = [127, 0, 0, 1].into();
        let mut endpoint = Endpoint::open(provider, Some(local)).expect("an endpoint");
        let memory = Arc::new(Bytes((0..bytes).map(byte).collect()));
        let region = endpoint.expose(memory, 0x1234_5678_9abc).expect("a region");
        assert_eq!(region.bytes, bytes as u64);
        let address = endpoint.address().expect("an address");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                endpoint.progress(Duration::from_millis(20));
            }
        });
        Self {
            region,
            address,
            stop,
            thread: Some(thread),
        }
    }

    fn connect(&self, provider: &str, buffers: usize) -> (Endpoint, Vec<Buffer>) {
        let local = [127, 0, 0, 1].into();
        let mut endpoint = Endpoint::open(provider, Some(local)).expect("an endpoint");
        assert_eq!(endpoint.provider(), provider);
        endpoint
            .connect(&self.address)
            .expect("the address of the host");
        let buffers = Pool::create(buffers, BUFFER).expect("memory");
        endpoint.prepare(buffers[0].pool()).expect("registered");
        (endpoint, buffers)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn memory_is_read_whole_and_in_pieces_with_a_window_of_reads() {
    for provider in PROVIDERS {
        let host = Host::start(provider, 24 * BUFFER + 77);
        let (mut endpoint, mut free) = host.connect(provider, 8);
        let region = RemoteRegion::check(&host.region).expect("it can be");
        // Each buffer receives one part of the memory: two of three by one read, the third by many small reads.
        let total = 24 * BUFFER + 77;
        let started_at = Instant::now();
        let (mut next, mut done) = (0, 0);
        while done < total {
            assert!(
                started_at.elapsed() < TEST_TIMEOUT,
                "{provider}: {done} of {total}"
            );
            if next < total
                && let Some(buffer) = free.pop()
            {
                let bytes = BUFFER.min(total - next);
                let step = if next / BUFFER % 3 == 1 { 5000 } else { bytes };
                let parts = (0..bytes).step_by(step);
                let reads = parts.map(|at| at..bytes.min(at + step));
                let reads = reads.map(|into| region.read((next + into.start) as u64, into));
                let reads: Result<Vec<_>, _> = reads.collect();
                endpoint
                    .land(next as u64, buffer, reads.expect("within"))
                    .expect("begun");
                next += bytes;
                continue;
            }
            let landed = endpoint.poll(Duration::from_millis(100), STALL_TIMEOUT);
            let Some(landed) = landed.expect("a read") else {
                continue;
            };
            let from = landed.number as usize;
            let bytes = BUFFER.min(total - from);
            let is_right = (0..bytes).all(|index| landed.buffer[index] == byte(from + index));
            assert!(is_right, "{provider}: at {from}");
            done += bytes;
            free.push(landed.buffer);
        }
        assert!(
            endpoint
                .poll(Duration::ZERO, STALL_TIMEOUT)
                .expect("nothing")
                .is_none()
        );
    }
}

/// A reader with a wrong key, or with a range beyond the region, reads nothing. The host still serves other readers.
#[test]
fn a_wrong_key_and_bytes_beyond_the_region_are_refused() {
    let provider = "tcp;ofi_rxm";
    let host = Host::start(provider, 4 * BUFFER);
    let real = host.region;
    let wrong_regions = [
        Region {
            key: real.key ^ 1,
            ..real
        },
        Region {
            base: real.base.wrapping_add(4 * BUFFER as u64 - 100),
            bytes: BUFFER as u64,
            ..real
        },
        Region {
            base: 1 << 40,
            ..real
        },
    ];
    for region in wrong_regions {
        let (mut endpoint, mut buffers) = host.connect(provider, 1);
        let false_region = RemoteRegion::check(&region).expect("it can be");
        let buffer = buffers.pop().expect("a buffer");
        let read = false_region.read(0, 0..BUFFER).expect("within");
        let landing = endpoint.land(1, buffer, vec![read]);
        let refused = landing.and_then(|()| endpoint.poll(TEST_TIMEOUT, STALL_TIMEOUT).map(|_| ()));
        let error = refused.expect_err("memory that is not exposed is not read");
        println!("{region:?}: {error}");
        // After an error the endpoint begins no further read.
        assert!(endpoint.poll(Duration::ZERO, STALL_TIMEOUT).is_err());
    }
    let (mut endpoint, mut buffers) = host.connect(provider, 1);
    let region = RemoteRegion::check(&real).expect("it can be");
    let read = region.read(77, 0..1000).expect("within");
    endpoint
        .land(2, buffers.pop().expect("a buffer"), vec![read])
        .expect("begun");
    let landed = endpoint
        .poll(TEST_TIMEOUT, STALL_TIMEOUT)
        .expect("a read")
        .expect("in time");
    assert!((0..1000).all(|at| landed.buffer[at] == byte(77 + at)));
}

#[test]
fn regions_and_addresses_of_another_host_are_checked() {
    let overflowing = Region {
        key: 1,
        base: u64::MAX - 10,
        bytes: 20,
    };
    assert!(matches!(
        RemoteRegion::check(&overflowing),
        Err(OfiError::Implausible(_))
    ));
    let region = RemoteRegion::check(&Region {
        key: 1,
        base: 0,
        bytes: 100,
    })
    .expect("it can be");
    assert!(region.read(0, 0..100).is_ok());
    for (at, into) in [(1, 0..100), (u64::MAX, 0..2), (101, 0..0)] {
        assert!(matches!(
            region.read(at, into),
            Err(OfiError::Implausible(_))
        ));
    }
    let mut endpoint = Endpoint::open("tcp;ofi_rxm", None).expect("an endpoint");
    for address in [&[][..], &[1; 256], &[1; 4000]] {
        assert!(matches!(
            endpoint.connect(address),
            Err(OfiError::Implausible(_))
        ));
    }
    // Random bytes with the length of an address may be refused or accepted, but must not crash.
    let _ = endpoint.connect(&[0xff; 16]);
}

/// If the other side ends, reads fail in time. No buffer is freed while libfabric may still write to it.
#[test]
fn a_host_that_is_gone_is_an_error_in_time() {
    let provider = "tcp;ofi_rxm";
    let host = Host::start(provider, 4 * BUFFER);
    let (mut endpoint, mut buffers) = host.connect(provider, 4);
    let region = RemoteRegion::check(&host.region).expect("it can be");
    drop(host);
    let started_at = Instant::now();
    let mut result = Ok(None);
    for (number, buffer) in buffers.drain(..).enumerate() {
        let read = region.read(0, 0..BUFFER).expect("within");
        if let Err(error) = endpoint.land(number as u64, buffer, vec![read]) {
            result = Err(error);
            break;
        }
    }
    if result.is_ok() {
        result = endpoint.poll(TEST_TIMEOUT, STALL_TIMEOUT);
    }
    assert!(result.is_err(), "a read of memory that is gone");
    let returned = endpoint.close().expect("libfabric closes the endpoint");
    println!("{} of 4 buffers were in use", returned.len());
    assert!(!returned.is_empty());
    assert!(started_at.elapsed() < TEST_TIMEOUT);
}

#[test]
fn the_error_of_a_missing_provider_lists_the_available_ones() {
    let library = Library::load().expect("libfabric: scripts/setup installs it");
    let providers = library.providers();
    assert!(
        providers.iter().any(|provider| provider.is_named("tcp")),
        "{providers:?}"
    );
    let error = Endpoint::open("nonesuch", None)
        .err()
        .expect("no such provider");
    let message = error.to_string();
    assert!(
        message.contains("nonesuch") && message.contains("tcp"),
        "{message}"
    );
}
