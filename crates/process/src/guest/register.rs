//! Who belongs to the guest.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use hotspare_image::tree::GuestPid;
use hotspare_kernel::kept_file::KeptFile;
use hotspare_kernel::ptrace::{Registers, Stop};
use hotspare_kernel::remote::Stub;
use hotspare_kernel::thread_info::{self, Status};
use hotspare_kernel::{HostPid, pidfd};

use super::{Guest, Held};
use crate::capture::ProcessCache;
use crate::capture::asleep::Asleep;
use crate::capture::known::KnownThread;
use crate::capture::space::Space;
use crate::capture::threads::Answers;
use crate::objects::error::ObjectResult;

/// A living process.
#[derive(Debug)]
pub struct Process {
    /// Host number.
    pub pid: HostPid,
    /// Guest number.
    pub guest_pid: GuestPid,
    pub(crate) pidfd: Arc<OwnedFd>,
    /// What is known of its memory; `None` until the first scan after birth or exec.
    pub(crate) space: Option<Space>,
    pub(crate) stub: Option<Stub>,
    pub(crate) cache: ProcessCache,
    /// It runs in its parent's memory until it calls execve or ends (vfork(2)).
    pub(crate) borrows_memory: bool,
    /// Its parent waits for that (vfork(2)), so it must run for the parent to stop.
    pub(crate) keeps_parent: bool,
}

/// A thread.
#[derive(Debug)]
pub struct Thread {
    /// Host number.
    pub tid: HostPid,
    /// Guest number.
    pub guest_tid: GuestPid,
    /// Thread group, host number.
    pub process: HostPid,
    /// How it is stopped; `None` while it runs.
    pub(crate) held: Option<Held>,
    /// A restartable system call it has been seen in.
    pub(crate) restart: Option<SeenRestart>,
    /// A wait that a stop had ended and that was made again.
    pub(crate) made_again: Option<super::waits::MadeAgain>,
    /// Its registers when it was last stopped, as it was put back then.
    pub(crate) stopped: Registers,
    /// What it is, if it has been asleep since that was found out.
    pub(crate) asleep: Option<Asleep>,
    /// What it is, if its mark is the same.
    pub(crate) known: Option<KnownThread>,
    /// It waits for a vfork child and cannot be stopped.
    pub(crate) in_vfork: bool,
    /// What it last said about itself.
    pub(crate) answers: Option<Answers>,
    /// `/proc/TID/status`.
    pub(crate) status: KeptFile,
    /// `/proc/TID/comm`.
    pub(crate) name: KeptFile,
}

/// A restartable system call as first seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenRestart {
    pub registers: Registers,
    pub call: i64,
    pub since: Instant,
}

/// An ended process that its parent may still wait for.
#[derive(Clone, Debug)]
pub struct Ended {
    /// wait(2) status.
    pub status: i32,
}

impl Guest {
    /// Enters the children of an adopted tree that have ended and that nobody has waited for.
    pub(crate) fn find_zombies(&mut self) -> ObjectResult<()> {
        for tid in self.threads.keys() {
            for child in thread_info::children(*tid)? {
                if let Some(status) = thread_info::zombie_status(child)? {
                    self.ended.insert(child, Ended { status });
                }
            }
        }
        Ok(())
    }

    /// Enters a thread, and its process if that is new.
    pub(crate) fn register(&mut self, tid: HostPid) -> ObjectResult<()> {
        if self.threads.contains_key(&tid) {
            return Ok(());
        }
        let status = match thread_info::status(tid) {
            // The end of a child may be reported before its birth.
            Ok(status) if matches!(status.state, b'Z' | b'X') => return Ok(()),
            Ok(status) => status,
            Err(error) if error.is_died() => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let process = HostPid(status.group);
        if !self.processes.contains_key(&process) {
            match pidfd::open(process) {
                Ok(pidfd) => self.enter_process(process, &status, pidfd)?,
                Err(error) if error.is_died() => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        self.threads.insert(
            tid,
            Thread {
                tid,
                guest_tid: GuestPid(status.inner_tid),
                process,
                held: None,
                restart: None,
                made_again: None,
                stopped: [0; 27],
                asleep: None,
                known: None,
                in_vfork: false,
                answers: None,
                status: KeptFile::of(tid, "status"),
                name: KeptFile::of(tid, "comm"),
            },
        );
        Ok(())
    }

    fn enter_process(&mut self, pid: HostPid, status: &Status, pidfd: OwnedFd) -> ObjectResult<()> {
        let parent = HostPid(status.parent);
        let borrows_memory = self.processes.contains_key(&parent)
            && thread_info::share_memory(pid, parent).unwrap_or(false);
        let process = Process {
            pid,
            guest_pid: GuestPid(status.inner[0]),
            pidfd: Arc::new(pidfd),
            space: None,
            stub: None,
            cache: ProcessCache::new(pid),
            borrows_memory,
            keeps_parent: false,
        };
        self.processes.insert(pid, process);
        Ok(())
    }

    /// Takes note of the end of a thread or process.
    pub(crate) fn note_end(&mut self, tid: HostPid, status: i32) {
        self.threads.remove(&tid);
        if self.processes.remove(&tid).is_none() {
            return;
        }
        self.threads.retain(|_, thread| thread.process != tid);
        if tid == self.root {
            self.root_status = Some(status);
        }
        self.ended.insert(tid, Ended { status });
    }

    /// Takes note of a stop. The thread is still stopped when this returns.
    pub(crate) fn note_stop(&mut self, tid: HostPid, stop: Stop) -> ObjectResult<()> {
        self.register(tid)?;
        match stop {
            Stop::Born { event, child } => {
                self.register(child)?;
                if event == libc::PTRACE_EVENT_VFORK
                    && let Some(thread) = self.threads.get_mut(&tid)
                {
                    thread.in_vfork = true;
                    if let Some(process) = self.processes.get_mut(&child) {
                        process.keeps_parent = process.borrows_memory;
                    }
                }
            }
            Stop::VforkDone => {
                if let Some(thread) = self.threads.get_mut(&tid) {
                    thread.in_vfork = false;
                }
            }
            Stop::Exec { former } => self.note_exec(tid, former)?,
            Stop::Signal(_)
            | Stop::Interrupted
            | Stop::Group(_)
            | Stop::Exiting { .. }
            | Stop::Syscall => {}
        }
        Ok(())
    }

    /// execve(2): one thread is left, with new memory.
    fn note_exec(&mut self, tid: HostPid, former: HostPid) -> ObjectResult<()> {
        self.root_executed |= tid == self.root;
        self.threads.retain(|_, thread| thread.process != tid || thread.tid == tid);
        if former != tid {
            self.threads.remove(&tid);
            self.register(tid)?;
        }
        if let Some(process) = self.processes.get_mut(&tid) {
            process.space = None;
            process.stub = None;
            process.cache = ProcessCache::new(tid);
            process.borrows_memory = false;
            process.keeps_parent = false;
        }
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.restart = None;
            thread.in_vfork = false;
            thread.answers = None;
            thread.asleep = None;
            thread.known = None;
        }
        Ok(())
    }
}
