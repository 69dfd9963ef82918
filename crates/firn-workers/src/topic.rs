//! The queue of tasks for worker threads. It limits how many tasks run at a time on the same object (their *topic*,
//! such as one file), because these tasks may all hang together.

use std::collections::{HashMap, VecDeque};

use crate::Task;
use crate::class::{EXTRA_TASKS_MAX, TOPIC_TASKS_MAX};

/// The object on which a task may hang. Tasks that hang together have the same topic. A task must not wait for a task
/// of its topic that was added later, because that task may get no thread until the first one ends.
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
/// A task is *admitted* if it waits in `ready` for any free thread, or runs. The first admitted task of a topic needs
/// no permission. Each *extra* task, admitted beside another one of its topic, needs one of [`EXTRA_TASKS_MAX`] slots.
///
/// Invariants
/// * `extra_tasks` is the sum of `admitted - 1` over all topics, and at most [`EXTRA_TASKS_MAX`]. So if there are
///   [`EXTRA_TASKS_MAX`] more threads than topics, the first task of a topic always finds a thread.
/// * A task is not admitted only if its topic has [`TOPIC_TASKS_MAX`] admitted tasks, or if all slots are in use. In
///   the second case, the topic waits in `topics_waiting_for_slot`.
#[derive(Default)]
pub(crate) struct Queue {
    /// Admitted tasks that have no thread yet.
    ready: VecDeque<QueuedTask>,
    /// The topics that have an admitted task, and only these.
    topics: HashMap<Topic, TopicTasks>,
    /// Number of slots in use: the admitted tasks of all topics, without the first one of each topic.
    extra_tasks: usize,
    /// Topics that wait for a slot, in the order in which they get one. Each topic is here once.
    topics_waiting_for_slot: VecDeque<Topic>,
}

/// A task that may have a thread.
pub(crate) struct QueuedTask {
    pub(crate) topic: Option<Topic>,
    pub(crate) task: Task,
}

/// The tasks of one topic.
#[derive(Default)]
struct TopicTasks {
    /// Number of admitted tasks.
    admitted: usize,
    /// Tasks that are not admitted.
    waiting: VecDeque<Task>,
    /// Whether the topic is in [`Queue::topics_waiting_for_slot`].
    is_waiting_for_slot: bool,
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
        if tasks.admitted == 0 {
            tasks.admitted = 1;
            self.push_ready(topic, task);
            return true;
        }
        tasks.waiting.push_back(task);
        let is_admitted = self.try_admit_extra_task(topic);
        self.assert_invariants();
        is_admitted
    }

    /// Admits one more waiting task of a topic that already has an admitted task: from now on any free thread may run
    /// it. Returns false if no task of the topic waits, or if a limit is reached.
    ///
    /// There are two limits: for the tasks of one topic, and for the extra tasks of all topics together. A topic is the
    /// object on which its tasks may hang together.
    fn try_admit_extra_task(&mut self, topic: Topic) -> bool {
        let tasks = self
            .topics
            .get_mut(&topic)
            .expect("the topic has a started task");
        if tasks.waiting.is_empty() || tasks.admitted == TOPIC_TASKS_MAX {
            return false;
        }
        if self.extra_tasks == EXTRA_TASKS_MAX {
            // The topic waits until an extra task of any topic ends. Waiting topics are served in their order.
            if !tasks.is_waiting_for_slot {
                tasks.is_waiting_for_slot = true;
                self.topics_waiting_for_slot.push_back(topic);
            }
            return false;
        }
        let task = tasks.waiting.pop_front().expect("a task waits");
        tasks.admitted += 1;
        self.extra_tasks += 1;
        self.push_ready(topic, task);
        true
    }

    /// Puts an admitted task into the queue for the threads.
    fn push_ready(&mut self, topic: Topic, task: Task) {
        self.ready.push_back(QueuedTask {
            topic: Some(topic),
            task,
        });
    }

    /// Returns the number of admitted tasks that have no thread yet.
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
    /// All admitted tasks of a topic, except for one, are *extra* tasks. Their number over all topics is limited, so
    /// the end of an extra task lets a topic that waits for this limit admit one.
    pub(crate) fn end_task(&mut self, topic: Option<Topic>) {
        let Some(topic) = topic else { return };
        let tasks = self
            .topics
            .get_mut(&topic)
            .expect("a topic is known while a task of it runs");
        if tasks.admitted == 1 {
            match tasks.waiting.pop_front() {
                Some(task) => self.push_ready(topic, task),
                None => self.remove_topic(topic),
            }
        } else {
            tasks.admitted -= 1;
            self.extra_tasks -= 1;
            // Waiting topics come before this one. Otherwise a topic would keep its slots as long as it has tasks.
            self.admit_extra_task_of_next_topic();
            self.try_admit_extra_task(topic);
        }
        self.assert_invariants();
    }

    /// Admits an extra task of the first waiting topic that still has one to admit.
    fn admit_extra_task_of_next_topic(&mut self) {
        while let Some(topic) = self.topics_waiting_for_slot.pop_front() {
            let tasks = self.topics.get_mut(&topic);
            tasks
                .expect("a short topic has a started task")
                .is_waiting_for_slot = false;
            if self.try_admit_extra_task(topic) {
                // If more tasks of this topic wait, the topic goes to the end of the queue.
                self.try_admit_extra_task(topic);
                return;
            }
        }
    }

    fn remove_topic(&mut self, topic: Topic) {
        let tasks = self.topics.remove(&topic);
        if tasks.is_some_and(|tasks| tasks.is_waiting_for_slot) {
            self.topics_waiting_for_slot
                .retain(|waiting| *waiting != topic);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.topics.is_empty() && self.extra_tasks == 0
    }

    /// Asserts the invariants of [`Queue`] in debug builds: the counts of admitted tasks, and which topics wait.
    fn assert_invariants(&self) {
        #[cfg(debug_assertions)]
        {
            let extra_tasks = self.topics.values().map(|tasks| tasks.admitted - 1);
            assert_eq!(extra_tasks.sum::<usize>(), self.extra_tasks);
            assert!(self.extra_tasks <= EXTRA_TASKS_MAX);
            let waiting_topics = self
                .topics
                .values()
                .filter(|tasks| tasks.is_waiting_for_slot);
            assert_eq!(waiting_topics.count(), self.topics_waiting_for_slot.len());
            for tasks in self.topics.values() {
                assert!((1..=TOPIC_TASKS_MAX).contains(&tasks.admitted));
                assert!(
                    tasks.waiting.is_empty()
                        || tasks.admitted == TOPIC_TASKS_MAX
                        || tasks.is_waiting_for_slot && self.extra_tasks == EXTRA_TASKS_MAX
                );
            }
        }
    }
}
