//! The queue of tasks for worker threads. It limits how many tasks run at a time on the same object (their *topic*,
//! such as one file), because these tasks may all hang together.

use std::collections::{HashMap, VecDeque};

use crate::Task;
use crate::class::{FURTHER_TASKS_MAX, TOPIC_TASKS_MAX};

/// The object on which a task may hang. Tasks that hang together have the same topic. A task never waits for a task
/// of the same topic that begins later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Topic {
    /// Kind of the object: a number that the caller chooses.
    pub kind: u8,
    /// Number of the object among the objects of its kind.
    pub id: u64,
    /// Number of the part of the object.
    pub part: u64,
}

/// Tasks that wait for a thread, and tasks that wait for other tasks of their topic.
///
/// A task is *started* once it may have a thread: it is in `ready`, or it runs. A *further* task of a topic is one that
/// is started while another task of the topic is.
///
/// Invariants
/// * `topics` contains exactly the topics with a started task; `started` counts these tasks.
/// * `further_tasks` is the sum of `started - 1` over all topics, and at most [`FURTHER_TASKS_MAX`]. If there is a
///   thread for each topic and [`FURTHER_TASKS_MAX`] more, the first task of a topic therefore always finds a thread.
/// * `started` of a topic is at most [`TOPIC_TASKS_MAX`].
/// * If a topic has waiting tasks and fewer than [`TOPIC_TASKS_MAX`] started ones, it is in `short_topics`, and
///   `further_tasks` is [`FURTHER_TASKS_MAX`].
/// * `short_topics` contains exactly the topics with `is_short`, each once.
#[derive(Default)]
pub(crate) struct Queue {
    ready: VecDeque<QueuedTask>,
    topics: HashMap<Topic, TopicTasks>,
    further_tasks: usize,
    /// Topics that wait for the next further task, in turn.
    short_topics: VecDeque<Topic>,
}

/// A task that may have a thread.
pub(crate) struct QueuedTask {
    pub(crate) topic: Option<Topic>,
    pub(crate) task: Task,
}

/// The tasks of one topic.
#[derive(Default)]
struct TopicTasks {
    /// Number of started tasks.
    started: usize,
    /// Tasks that are not started.
    waiting: VecDeque<Task>,
    /// Whether the topic is in [`Queue::short_topics`].
    is_short: bool,
}

impl Queue {
    /// Adds a task. Returns false if the task must wait for an earlier task to end. A topic is the object on which its
    /// tasks may hang together; a task without topic waits for no other task.
    pub(crate) fn add(&mut self, topic: Option<Topic>, task: Task) -> bool {
        let Some(topic) = topic else {
            self.ready.push_back(QueuedTask { topic: None, task });
            return true;
        };
        let tasks = self.topics.entry(topic).or_default();
        if tasks.started == 0 {
            tasks.started = 1;
            self.push_ready(topic, task);
            return true;
        }
        tasks.waiting.push_back(task);
        let is_started = self.start_further_task(topic);
        self.assert_invariants();
        is_started
    }

    /// Starts one more task of a topic (an object on which tasks may hang together) that already has a started one.
    /// Returns whether a task was started.
    ///
    /// Such *further* tasks have two limits: one for each topic, and one for all topics together.
    fn start_further_task(&mut self, topic: Topic) -> bool {
        let tasks = self
            .topics
            .get_mut(&topic)
            .expect("the topic has a started task");
        if tasks.waiting.is_empty() || tasks.started == TOPIC_TASKS_MAX {
            return false;
        }
        if self.further_tasks == FURTHER_TASKS_MAX {
            // The topic gets the next further task that is allowed, in turn with other topics.
            if !tasks.is_short {
                tasks.is_short = true;
                self.short_topics.push_back(topic);
            }
            return false;
        }
        let task = tasks.waiting.pop_front().expect("a task waits");
        tasks.started += 1;
        self.further_tasks += 1;
        self.push_ready(topic, task);
        true
    }

    /// Lets a started task have a thread.
    fn push_ready(&mut self, topic: Topic, task: Task) {
        self.ready.push_back(QueuedTask {
            topic: Some(topic),
            task,
        });
    }

    /// Returns the number of started tasks that have no thread yet.
    pub(crate) fn ready_count(&self) -> usize {
        self.ready.len()
    }

    /// Returns the next task for a thread. The caller must report the end of the task by [`Queue::end_task`].
    pub(crate) fn take_task(&mut self) -> Option<QueuedTask> {
        self.ready.pop_front()
    }

    /// Records that a task ended, and starts tasks that waited for it. `topic` is the object on which the task could
    /// hang; the end of a task without a topic starts no other task.
    ///
    /// A topic may have several started tasks. Those after the first are *further* tasks, of which there is a limit
    /// over all topics. A *short* topic waits for the right to start one.
    pub(crate) fn end_task(&mut self, topic: Option<Topic>) {
        let Some(topic) = topic else { return };
        let tasks = self
            .topics
            .get_mut(&topic)
            .expect("a topic is known while a task of it runs");
        if tasks.started == 1 {
            match tasks.waiting.pop_front() {
                Some(task) => self.push_ready(topic, task),
                None => self.remove_topic(topic),
            }
        } else {
            tasks.started -= 1;
            self.further_tasks -= 1;
            // Other topics come first, so that a topic with many tasks does not prevent them from starting more than
            // one task each.
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
                // If more tasks of this topic wait, the topic goes to the end of the queue.
                self.start_further_task(topic);
                return;
            }
        }
    }

    fn remove_topic(&mut self, topic: Topic) {
        let tasks = self.topics.remove(&topic);
        if tasks.is_some_and(|tasks| tasks.is_short) {
            self.short_topics.retain(|short| *short != topic);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.topics.is_empty() && self.further_tasks == 0
    }

    /// Asserts the invariants of [`Queue`] in debug builds: the counts of started tasks, and which topics wait.
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
