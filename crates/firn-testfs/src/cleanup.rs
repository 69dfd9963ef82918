//! What a benchmark must undo, however it ends.
//!
//! Promises
//! * Every action that was registered runs exactly once: when its [`Guard`] is dropped (return,
//!   error or panic) or when SIGINT, SIGTERM or SIGHUP arrives, newest first.
//! * An action is registered *before* the thing it undoes exists, so actions must be content to find
//!   nothing to do.

use std::sync::OnceLock;

use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

type Action = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Registry {
    next_id: u64,
    actions: Vec<(u64, Action)>,
}

fn registry() -> &'static Mutex<Registry> {
    static REGISTRY: OnceLock<Mutex<Registry>> = OnceLock::new();
    REGISTRY.get_or_init(Default::default)
}

/// Runs its action when dropped.
#[must_use = "the action runs as soon as the guard is dropped"]
pub struct Guard(u64);

/// Registers `action`.
pub fn defer(action: impl FnOnce() + Send + 'static) -> Guard {
    let mut registry = registry().lock();
    registry.next_id += 1;
    let id = registry.next_id;
    registry.actions.push((id, Box::new(action)));
    Guard(id)
}

impl Drop for Guard {
    fn drop(&mut self) {
        let action = {
            let mut registry = registry().lock();
            let found = registry.actions.iter().position(|(id, _)| *id == self.0);
            found.map(|index| registry.actions.remove(index).1)
        };
        if let Some(action) = action {
            action();
        }
    }
}

/// From now on a signal that ends the program undoes everything first and exits with 128 + signal.
pub fn on_signals() -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                eprintln!("firn: interrupted, removing what the benchmark set up");
                // The lock is never given back: the main thread can then neither set up anything more
                // nor undo something twice.
                let mut registry = registry().lock();
                while let Some((_, action)) = registry.actions.pop() {
                    action();
                }
                std::process::exit(128 + signal);
            }
        })?;
    Ok(())
}
