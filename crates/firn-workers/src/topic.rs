//! Tasks in order, and what they may wait for together.

use std::collections::{HashMap, VecDeque};

use crate::Task;
use crate::class::OF_A_TOPIC_MAX;

/// What a task may wait for: tasks that hang together have the same. No task waits for one that is begun later and has
/// the same topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Topic {
    /// What kind of thing, by a number of the caller's.
    pub kind: u8,
    /// Which of them.
    pub id: u64,
    /// Which part of it.
    pub part: u64,
}

/// Tasks that wait to be run.
///
/// Invariants
/// * A topic is in `topics` as long as a task of it runs or is in `ready`; `started` counts those.
/// * `waiting` of a topic has tasks only where `started` is [`OF_A_TOPIC_MAX`].
#[derive(Default)]
pub(crate) struct Queue {
    ready: VecDeque<(Option<Topic>, Task)>,
    topics: HashMap<Topic, OfTopic>,
}

#[derive(Default)]
struct OfTopic {
    started: usize,
    waiting: VecDeque<Task>,
}

impl OfTopic {
    fn assert_invariants(&self) {
        debug_assert!((1..=OF_A_TOPIC_MAX).contains(&self.started));
        debug_assert!(self.waiting.is_empty() || self.started == OF_A_TOPIC_MAX);
    }
}

impl Queue {
    /// Whether the task does not wait for one of its topic.
    pub(crate) fn add(&mut self, topic: Option<Topic>, task: Task) -> bool {
        if let Some(topic) = topic {
            let of_topic = self.topics.entry(topic).or_default();
            if of_topic.started == OF_A_TOPIC_MAX {
                of_topic.waiting.push_back(task);
                return false;
            }
            of_topic.started += 1;
            of_topic.assert_invariants();
        }
        self.ready.push_back((topic, task));
        true
    }

    /// Tasks that a thread could begin now.
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    pub(crate) fn take(&mut self) -> Option<(Option<Topic>, Task)> {
        self.ready.pop_front()
    }

    /// A task of the topic ended.
    pub(crate) fn end(&mut self, topic: Option<Topic>) {
        let Some(topic) = topic else { return };
        let of_topic = self
            .topics
            .get_mut(&topic)
            .expect("a topic is known while a task of it runs");
        match of_topic.waiting.pop_front() {
            Some(task) => self.ready.push_back((Some(topic), task)),
            None => {
                of_topic.started -= 1;
                if of_topic.started == 0 {
                    self.topics.remove(&topic);
                    return;
                }
            }
        }
        of_topic.assert_invariants();
    }
}
