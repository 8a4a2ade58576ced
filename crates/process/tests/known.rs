//! What marks say has not changed has not changed: a checkpoint that asks nobody says what one says
//! that asks everybody.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use hotspare_image::Checkpoint;
use hotspare_image::memory::Layout;
use hotspare_image::tree::{Process, ProcessState};
use hotspare_kernel::marks::Marks;
use hotspare_kernel::ptrace::reg;
use hotspare_kernel::{HostPid, thread_info};
use hotspare_process::capture::CheckpointRules;
use hotspare_process::capture::shared::SharedTable;
use hotspare_process::guest::Guest;
use hotspare_process::objects::error::ObjectError;

/// Executes what it is told, line by line, and answers each with a dot.
const PROGRAM: &str = "
import ctypes, faulthandler, mmap, os, resource, signal, sys, threading, time
libc = ctypes.CDLL(None)
print('.', flush=True)
for line in sys.stdin:
    exec(line)
    print('.', flush=True)
";

/// Each changes something that a checkpoint says of a thread or a process.
const CHANGES: [&str; 34] = [
    "pass",
    "signal.signal(10, lambda *a: None)",
    "signal.signal(12, signal.SIG_IGN)",
    "signal.pthread_sigmask(signal.SIG_BLOCK, [13, 14])",
    "os.kill(os.getpid(), 13)",
    "signal.pthread_kill(threading.get_ident(), 14)",
    "os.umask(0o27)",
    "os.chdir('/tmp')",
    "resource.setrlimit(resource.RLIMIT_CORE, (4096, resource.getrlimit(resource.RLIMIT_CORE)[1]))",
    "os.nice(3)",
    "os.setpgid(0, 0)",
    "os.sched_setaffinity(0, {0})",
    "os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))",
    "libc.syscall(251, 1, 0, 2 << 13 | 5)",
    "libc.prctl(15, b'another name')",
    "libc.prctl(29, 77777)",
    "libc.prctl(1, 12)",
    "libc.prctl(4, 0)",
    "libc.prctl(4, 1)",
    "libc.prctl(36, 1)",
    "libc.prctl(41, 1, 0, 0, 0)",
    "libc.prctl(28, 1 << 4)",
    "faulthandler.enable(file=sys.stderr)",
    "os.setgroups([1, 2, 3])",
    "os.setgroups([1, 2, 4])",
    "os.setresgid(5, 6, 7)",
    "libc.personality(0x40000)",
    "libc.mlockall(2)",
    "libc.sbrk(1 << 20)",
    "libc.syscall(324, 1 << 4, 0, 0)",
    "open('/proc/self/oom_score_adj', 'w').write('100')",
    "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "signal.setitimer(signal.ITIMER_REAL, 1000)",
    "libc.prctl(38, 1, 0, 0, 0)",
];

struct Told {
    guest: Guest,
    says: Receiver<()>,
    ear: ChildStdin,
}

impl Told {
    #[expect(clippy::zombie_processes, reason = "whoever traces it reaps it")]
    fn begin() -> Self {
        let mut child = Command::new("sh")
            .args(["-c", "read go; exec python3 -u -c \"$0\"", PROGRAM])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawns");
        let guest = Guest::seize(HostPid(child.id() as i32)).expect("seizes");
        let lines = BufReader::new(child.stdout.take().expect("has stdout")).lines();
        let (tell, says) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                assert_eq!(line, ".");
                if tell.send(()).is_err() {
                    break;
                }
            }
        });
        let mut this = Self { guest, says, ear: child.stdin.take().expect("has stdin") };
        this.tell("go");
        this
    }

    /// Tells it to do something; when this returns it has, and waits for more.
    fn tell(&mut self, what: &str) {
        writeln!(self.ear, "{what}").expect("writes");
        while self.says.try_recv().is_err() {
            assert!(self.guest.is_alive(), "has ended");
            self.guest.pump(&[], Duration::from_millis(5)).expect("pumps");
        }
        // It sleeps in nothing else now.
        let sleeps = |pid| thread_info::status(pid).is_ok_and(|status| status.state == b'S');
        while !self.guest.processes().all(sleeps) {
            self.guest.pump(&[], Duration::from_millis(5)).expect("pumps");
        }
    }

    fn checkpoint(&mut self) -> Checkpoint {
        loop {
            self.guest.pump(&[], Duration::from_millis(5)).expect("pumps");
            let mut nothing = |_: &Guest, _: &mut SharedTable, _: &mut Checkpoint| Ok(());
            let mut rules = CheckpointRules { objects: &mut nothing, copy_all: false };
            let prepared = self.guest.prepare();
            let taken =
                prepared.and_then(|()| self.guest.checkpoint(u64::MAX, &mut rules, &mut || Ok(())));
            match taken {
                Ok(taken) => return taken.expect("is not too much").checkpoint,
                Err(ObjectError::Transient { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.guest.kill();
        while self.guest.is_alive() {
            if self.guest.pump(&[], Duration::from_millis(20)).is_err() {
                return;
            }
        }
    }
}

/// What a checkpoint says of processes, and of the memory of each but what is mapped.
#[derive(Debug, PartialEq)]
struct Described {
    processes: Vec<Process>,
    layouts: Vec<Layout>,
}

/// Without what time alone changes, and our looking.
fn timeless(checkpoint: Checkpoint) -> Described {
    let Checkpoint { mut processes, spaces, .. } = checkpoint;
    let layouts = spaces.into_iter().map(|space| space.layout).collect();
    for process in &mut processes {
        let ProcessState::Alive(live) = &mut process.state else { continue };
        for timer in &mut live.interval_timers {
            timer.value_us = u64::from(timer.value_us > 0);
        }
        for thread in &mut live.threads {
            if let Some(restart) = &mut thread.restart {
                restart.blocked_ns = 0;
            }
            // A sleeper is marked in its flags once it has been looked at, and may be about to
            // begin its call again.
            for index in [reg::EFLAGS, reg::R11, reg::RAX, reg::ORIG_RAX, reg::RIP] {
                thread.registers[index] = 0;
            }
        }
    }
    Described { processes, layouts }
}

/// Without what running alone changes: what is left is of the change.
fn lasting(mut described: Described) -> Described {
    for process in &mut described.processes {
        let ProcessState::Alive(live) = &mut process.state else { continue };
        for thread in &mut live.threads {
            thread.registers.fill(0);
            thread.extended.clear();
            thread.restart = None;
        }
    }
    described
}

/// The first line in which their descriptions differ.
fn difference(one: &Described, other: &Described) -> Option<(String, String)> {
    let (one, other) = (format!("{one:#?}"), format!("{other:#?}"));
    let pair = one.lines().zip(other.lines()).find(|(one, other)| one != other)?;
    Some((pair.0.into(), pair.1.into()))
}

#[test]
fn what_is_taken_as_known_is_what_everybody_would_answer() {
    let mut told = Told::begin();
    assert!(Marks::loaded().is_some(), "this kernel shows no marks");
    for change in CHANGES {
        let before = timeless(told.checkpoint());
        told.tell(change);
        let first = timeless(told.checkpoint());
        let known = timeless(told.checkpoint());
        let asked = told.guest.freeze(|guest| {
            guest.forget_answers();
            guest.describe_stopped()
        });
        let asked = asked.expect("stops").expect("describes");
        let asked = timeless(asked);
        assert_eq!(difference(&first, &asked), None, "after {change}");
        assert_eq!(difference(&known, &asked), None, "once more after {change}");
        // Of mlockall(2) the flags of mappings tell.
        if !["pass", "libc.mlockall(2)"].contains(&change) {
            assert!(lasting(before) != lasting(first), "{change} changes nothing that is seen");
        }
    }
}
