//! Parallel work: does the same work on many items in several threads, so that their calls wait at the same time.
//!
//! ```
//! use firn_backing::parallel::try_map;
//!
//! let parse = |text: &&str| text.parse::<u32>();
//! assert_eq!(try_map("example", 4, &["1", "20"], &parse), Ok(vec![1, 20]));
//! assert!(try_map("example", 4, &["1", "x"], &parse).is_err());
//! ```

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Works on each item as [`try_map`] does, for work that cannot fail.
pub fn map<T: Sync, R: Send>(
    thread_name: &str,
    threads: usize,
    items: &[T],
    work: &(impl Fn(&T) -> R + Sync),
) -> Vec<R> {
    let work = |item: &T| Ok::<R, Infallible>(work(item));
    let Ok(results) = try_map(thread_name, threads, items, &work);
    results
}

/// The result for one item.
struct ItemResult<R> {
    /// Index of the item.
    index: usize,
    result: R,
}

/// Works on each item and returns the results in the order of the items. At most `threads` threads work, one of which
/// is the caller's. They take the items in order.
///
/// After an error no further item is begun, and an error is returned. If the system starts no further thread, the
/// caller's thread works on all items. A panic of a thread continues in the caller.
pub fn try_map<T: Sync, R: Send, E: Send>(
    thread_name: &str,
    threads: usize,
    items: &[T],
    work: &(impl Fn(&T) -> Result<R, E> + Sync),
) -> Result<Vec<R>, E> {
    let next_index = AtomicUsize::new(0);
    let work_on_items = || work_until_done(&next_index, items, work);
    let mut results_of_threads: Vec<Result<Vec<ItemResult<R>>, E>> = Vec::new();
    std::thread::scope(|scope| {
        let thread_count = threads.min(items.len());
        let mut started_threads = Vec::new();
        for _ in 1..thread_count {
            let builder = std::thread::Builder::new().name(thread_name.to_owned());
            started_threads.extend(builder.spawn_scoped(scope, work_on_items).ok());
        }
        results_of_threads.push(work_on_items());
        for thread in started_threads {
            let result = thread.join();
            results_of_threads
                .push(result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    let mut item_results = Vec::with_capacity(items.len());
    for results_of_thread in results_of_threads {
        item_results.extend(results_of_thread?);
    }
    item_results.sort_unstable_by_key(|item_result| item_result.index);
    let results = item_results.into_iter();
    Ok(results.map(|item_result| item_result.result).collect())
}

/// Body of one thread of [`try_map`]: works on the next item until no item is left or the work fails. `next_index` is
/// shared by all threads. After an error it is moved beyond the last item, so that no thread begins a further item.
fn work_until_done<T, R, E>(
    next_index: &AtomicUsize,
    items: &[T],
    work: &impl Fn(&T) -> Result<R, E>,
) -> Result<Vec<ItemResult<R>>, E> {
    let mut results = Vec::new();
    loop {
        let index = next_index.fetch_add(1, Ordering::Relaxed);
        let Some(item) = items.get(index) else {
            return Ok(results);
        };
        match work(item) {
            Ok(result) => results.push(ItemResult { index, result }),
            Err(error) => {
                next_index.store(items.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::Errno;

    #[test]
    fn the_results_have_the_order_of_the_items() {
        let items: Vec<usize> = (0..1_000).collect();
        for (threads, count) in [(0, 10), (1, 0), (1, 1_000), (7, 1_000)] {
            let items = &items[..count];
            let doubled = map("test", threads, items, &|item| item * 2);
            let expected: Vec<usize> = items.iter().map(|item| item * 2).collect();
            assert_eq!(doubled, expected, "{threads} threads");
        }
    }

    #[test]
    fn items_that_wait_for_each_other_are_worked_on_at_the_same_time() {
        let all = Barrier::new(4);
        let work = |_: &u8| all.wait().is_leader();
        let leaders = map("test", 4, &[0, 1, 2, 3], &work);
        let count = leaders.iter().filter(|is_leader| **is_leader).count();
        assert_eq!(count, 1);
    }

    #[test]
    fn after_an_error_no_item_is_begun() {
        let begun = AtomicUsize::new(0);
        let items: Vec<usize> = (0..1_000).collect();
        let work = |item: &usize| {
            begun.fetch_add(1, Ordering::Relaxed);
            match item {
                3 => Err(Errno::IO),
                _ => Ok(()),
            }
        };
        assert_eq!(try_map("test", 1, &items, &work), Err(Errno::IO));
        assert_eq!(begun.load(Ordering::Relaxed), 4);
    }
}
