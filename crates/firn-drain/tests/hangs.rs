//! Writes to the backing that do not return. This test is a separate program because it counts the log messages of its
//! thread. Another test thread that logs nothing could disable these messages for the whole process.

#[allow(dead_code, reason = "each program has its own part")]
#[path = "all/common/host.rs"]
mod host;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use firn_backing::Backing;
use firn_drain::IoThreads;
use firn_sim::SimBacking;
use host::{Drained, Host, LIMIT};

/// The log messages of the test's thread. All clones share them.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Collects messages until the returned guard is dropped.
    fn collect(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || log.clone());
        tracing::subscriber::set_default(subscriber.finish())
    }

    fn count(&self, message: &str) -> usize {
        let bytes = self.0.lock().expect("no panic");
        String::from_utf8_lossy(&bytes).matches(message).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until a file is drained. Meanwhile it replaces hanging threads, as firnd does each second.
fn await_with_stand_ins<B: Backing>(host: &Host<B>, told: &Drained) {
    let began = Instant::now();
    loop {
        host.pool.replace_hung();
        match told.recv_timeout(Duration::from_millis(100)) {
            Ok(drained) => break assert!(drained),
            Err(_) => assert!(began.elapsed() < LIMIT, "no thread stands in"),
        }
    }
    println!("drained after {:?}", began.elapsed());
}

/// Proves S-error-21.
#[test]
fn regression_where_all_io_threads_hang_others_drain_the_rest() {
    let log = Log::default();
    let _collecting = log.collect();
    let backing = SimBacking::new();
    let host = Host::start(backing.clone(), IoThreads::new(2), None);
    let hung: Vec<_> = ["one", "two"]
        .map(|name| {
            let hang = backing.hang("write_at");
            let (handle, told) = host.write_awaited(name);
            hang.await_call();
            (hang, handle, told)
        })
        .into();
    let (other, told) = host.write_awaited("other");
    await_with_stand_ins(&host, &told);
    host.engine.release(other);
    for _ in 0..10 {
        host.pool.replace_hung();
    }
    let hang_told = log.count("writes to the backing do not return");
    assert_eq!(hang_told, 1, "the log is for people: once is enough");
    for (hang, handle, told) in hung {
        assert!(told.try_recv().is_err(), "it still hangs");
        hang.release();
        assert!(told.recv_timeout(LIMIT).expect("drained"));
        host.engine.release(handle);
    }
    // A thread leaves its job a little later than the callers of the job are answered.
    let began = Instant::now();
    while log.count("writes to the backing return again") == 0 {
        assert!(began.elapsed() < LIMIT, "the end of the hang is not told");
        host.pool.replace_hung();
        std::thread::yield_now();
    }
    host.end();
}
