//! System V IPC and POSIX message queues, captured in one namespace, restored in another.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use hotspare_image::tree::GuestPid;
use hotspare_kernel::ipc::{self, Ownership, QueueAttributes};
use hotspare_process::objects::ipc::{
    IpcCapture, IpcState, remove_segment, restore, restore_segment, segment_file,
};
use nix::sched::{CloneFlags, unshare};

fn in_new_ipc<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWIPC).expect("needs root");
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn capture() -> IpcState {
    let namespace = File::open("/proc/thread-self/ns/ipc").expect("open");
    let mut capture = IpcCapture::open(namespace.into()).expect("open");
    let first = capture.capture(&GuestPid).expect("capture");
    assert_eq!(first, capture.capture(&GuestPid).expect("capture"), "a capture changes nothing");
    first
}

const OWNER: Ownership = Ownership { mode: 0o640, uid: 1000, gid: 1001 };

#[test]
fn an_empty_namespace_has_nothing() {
    assert_eq!(in_new_ipc(capture), IpcState::default());
}

#[test]
fn semaphores_keep_number_owner_and_values() {
    let state = in_new_ipc(|| {
        for key in 1..4 {
            ipc::create_semaphores(key, 3, OWNER).expect("create");
        }
        let id = ipc::create_semaphores(77, 3, OWNER).expect("create");
        ipc::set_semaphore_values(id, &[5, 0, 32_000]).expect("set");
        let mut state = capture();
        // Holes in the numbers.
        state.ipc.semaphores.drain(..3);
        state
    });
    let again = in_new_ipc(|| {
        restore(&state.ipc).expect("restore");
        capture()
    });
    let values = |state: &IpcState| {
        let values = state.ipc.semaphores[0].values.iter().map(|(value, _)| *value);
        values.collect::<Vec<_>>()
    };
    assert_eq!(state.ipc.semaphores[0].owner, again.ipc.semaphores[0].owner);
    assert_eq!(values(&state), values(&again));
    assert_eq!((again.ipc.semaphores[0].owner.uid, again.ipc.semaphores.len()), (1000, 1));
}

#[test]
fn messages_wait_in_their_order() {
    let state = in_new_ipc(|| {
        let id = ipc::create_queue(9, OWNER, 5000).expect("create");
        for (kind, bytes) in [(3, &b"one"[..]), (1, b""), (3, b"three")] {
            ipc::send_message(id, kind, bytes).expect("send");
        }
        capture()
    });
    let again = in_new_ipc(|| {
        restore(&state.ipc).expect("restore");
        capture()
    });
    assert_eq!(state, again);
    assert_eq!(state.ipc.message_queues[0].messages.len(), 3);
    assert_eq!(state.ipc.message_queues[0].capacity_bytes, 5000);
}

#[test]
fn posix_messages_wait_by_priority() {
    let limits = QueueAttributes { messages_max: 5, message_bytes_max: 100, messages: 0 };
    let state = in_new_ipc(|| {
        let queue = ipc::create_posix_queue("jobs", 0o600, limits).expect("create");
        let _empty = ipc::create_posix_queue("empty", 0o600, limits).expect("create");
        for (priority, bytes) in [(1, &b"a"[..]), (9, b"b"), (1, b"c"), (9, b""), (0, b"e")] {
            ipc::send_posix_message(queue.as_fd(), priority, bytes).expect("send");
        }
        capture()
    });
    let again = in_new_ipc(|| {
        restore(&state.ipc).expect("restore");
        capture()
    });
    assert_eq!(state, again);
    let jobs = &state.ipc.posix_queues[1];
    let order: Vec<_> = jobs.messages.iter().map(|message| &message.bytes[..]).collect();
    assert_eq!((jobs.name.as_str(), order), ("/jobs", vec![&b"b"[..], b"", b"a", b"c", b"e"]));
}

#[test]
fn a_segment_keeps_its_number_and_its_bytes_can_be_reached() {
    let state = in_new_ipc(|| {
        let first = ipc::create_segment(0, 4096, OWNER).expect("create");
        ipc::create_segment(0xbeef, 10_000, OWNER).expect("create");
        remove_segment(first).expect("remove");
        capture()
    });
    let (key, bytes) = (state.segments[0].owner.key, state.segments[0].bytes);
    assert_eq!((key, bytes), (0xbeef, 10_000));
    in_new_ipc(|| {
        let memory = restore_segment(&state.segments[0]).expect("restore");
        memory.write_all_at(b"shared", 8192).expect("write");
        let mut word = [0; 6];
        let other = segment_file(state.segments[0].owner.id).expect("open");
        other.read_exact_at(&mut word, 8192).expect("read");
        assert_eq!(&word, b"shared");
        let (again, wanted) = (&capture().segments[0], &state.segments[0]);
        assert_eq!((&again.owner, again.bytes), (&wanted.owner, wanted.bytes));
    });
}
