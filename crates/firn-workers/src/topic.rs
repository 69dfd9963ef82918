//! Tasks in the order in which they may begin, and the topics that they may hang for.

use std::collections::{HashMap, VecDeque};

use crate::Task;
use crate::class::{FURTHER_TASKS_MAX, TOPIC_TASKS_MAX};

/// What a task may wait for: tasks that hang together have the same topic. No task waits for one of the same topic that
/// begins later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Topic {
    /// What kind of thing it is, by a number of the caller's.
    pub kind: u8,
    /// Number of the thing among those of its kind.
    pub id: u64,
    /// Number of the part of the thing.
    pub part: u64,
}

/// Tasks that wait for a thread, and tasks that wait for others of their topic.
///
/// A task is *started* once it may have a thread: it is in `ready`, or runs.
///
/// Invariants
/// * `topics` has exactly the topics with a started task; `started` counts these tasks.
/// * `further_tasks` is the sum of `started - 1` over all topics, and at most [`FURTHER_TASKS_MAX`]. So with a thread
///   for each topic and [`FURTHER_TASKS_MAX`] more, the first task of a topic always finds a thread.
/// * `started` of a topic is at most [`TOPIC_TASKS_MAX`].
/// * A topic with waiting tasks and fewer than [`TOPIC_TASKS_MAX`] started ones is in `short_topics`, and
///   `further_tasks` is [`FURTHER_TASKS_MAX`].
/// * `short_topics` has exactly the topics with `is_short`, each once.
#[derive(Default)]
pub(crate) struct Queue {
    ready: VecDeque<(Option<Topic>, Task)>,
    topics: HashMap<Topic, TopicTasks>,
    further_tasks: usize,
    /// Topics that get the next further task, in turn.
    short_topics: VecDeque<Topic>,
}

#[derive(Default)]
struct TopicTasks {
    started: usize,
    waiting: VecDeque<Task>,
    is_short: bool,
}

impl Queue {
    /// Adds a task; `false` if it has to wait for a task that was started before.
    pub(crate) fn add(&mut self, topic: Option<Topic>, task: Task) -> bool {
        let Some(topic) = topic else {
            self.ready.push_back((None, task));
            return true;
        };
        let tasks = self.topics.entry(topic).or_default();
        if tasks.started == 0 {
            tasks.started = 1;
            self.ready.push_back((Some(topic), task));
            return true;
        }
        tasks.waiting.push_back(task);
        let is_started = self.start_further_task(topic);
        self.assert_invariants();
        is_started
    }

    /// Starts a waiting task of a topic that has a started one, if the limits allow it.
    fn start_further_task(&mut self, topic: Topic) -> bool {
        let tasks = self
            .topics
            .get_mut(&topic)
            .expect("the topic has a started task");
        if tasks.waiting.is_empty() || tasks.started == TOPIC_TASKS_MAX {
            return false;
        }
        if self.further_tasks == FURTHER_TASKS_MAX {
            if !std::mem::replace(&mut tasks.is_short, true) {
                self.short_topics.push_back(topic);
            }
            return false;
        }
        let task = tasks.waiting.pop_front().expect("a task waits");
        tasks.started += 1;
        self.further_tasks += 1;
        self.ready.push_back((Some(topic), task));
        true
    }

    /// Started tasks that have no thread yet.
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// The next task for a thread. To be told of its end by [`Queue::end`].
    pub(crate) fn take(&mut self) -> Option<(Option<Topic>, Task)> {
        self.ready.pop_front()
    }

    /// Says that a task of the topic ended, and starts those that waited for it.
    pub(crate) fn end(&mut self, topic: Option<Topic>) {
        let Some(topic) = topic else { return };
        let tasks = self
            .topics
            .get_mut(&topic)
            .expect("a topic is known while a task of it runs");
        if tasks.started == 1 {
            match tasks.waiting.pop_front() {
                Some(task) => self.ready.push_back((Some(topic), task)),
                None => self.forget(topic),
            }
        } else {
            tasks.started -= 1;
            self.further_tasks -= 1;
            // Others come first, so that a topic with many tasks does not keep them from starting more than one each.
            self.start_task_of_short_topic();
            self.start_further_task(topic);
        }
        self.assert_invariants();
    }

    fn start_task_of_short_topic(&mut self) {
        while let Some(topic) = self.short_topics.pop_front() {
            let tasks = self.topics.get_mut(&topic);
            tasks.expect("a short topic has a started task").is_short = false;
            if self.start_further_task(topic) {
                // If more of its tasks wait, it goes to the end of the line.
                self.start_further_task(topic);
                return;
            }
        }
    }

    fn forget(&mut self, topic: Topic) {
        let tasks = self.topics.remove(&topic);
        if tasks.is_some_and(|tasks| tasks.is_short) {
            self.short_topics.retain(|short| *short != topic);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.topics.is_empty() && self.further_tasks == 0
    }

    fn assert_invariants(&self) {
        #[cfg(debug_assertions)]
        {
            let further = self.topics.values().map(|tasks| tasks.started - 1);
            assert_eq!(further.sum::<usize>(), self.further_tasks);
            assert!(self.further_tasks <= FURTHER_TASKS_MAX);
            let short = self.topics.values().filter(|tasks| tasks.is_short);
            assert_eq!(short.count(), self.short_topics.len());
            for tasks in self.topics.values() {
                assert!((1..=TOPIC_TASKS_MAX).contains(&tasks.started));
                assert!(
                    tasks.waiting.is_empty()
                        || tasks.started == TOPIC_TASKS_MAX
                        || tasks.is_short && self.further_tasks == FURTHER_TASKS_MAX
                );
            }
        }
    }
}
