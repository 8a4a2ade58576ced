//! The open files of the last checkpoint, made for the ghost.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use hotspare_image::memory::SharedId;
use hotspare_image::objects::{Descriptor, Object};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::remote::Stub;
use hotspare_kernel::{HostPid, pidfd};

use super::body::Body;
use super::error::{GhostError, GhostResult};
use super::{Ghost, living};
use crate::objects::ipc;
use crate::objects::restore::{GhostParts, RestoreContext, Restored, own_descriptors, restore_all};
use crate::objects::rules::FileRules;
use crate::objects::unix::{SocketPairs, WantedPair, wanted_pairs};

/// What the restore of files must know of this host.
pub struct FileWorld<'a> {
    /// Standing of paths.
    pub rules: &'a FileRules,
    /// What takes the place of the guest's standard descriptors 0, 1, 2.
    pub standard: [BorrowedFd<'a>; 3],
    /// How old the checkpoint may be at most, ms.
    pub age_ms: u32,
}

struct Parts<'a> {
    hosts: BTreeMap<GuestPid, HostPid>,
    shared: BTreeMap<SharedId, BorrowedFd<'a>>,
    standard: [BorrowedFd<'a>; 3],
    pairs: Mutex<SocketPairs>,
}

impl GhostParts for Parts<'_> {
    fn host_pid(&self, pid: GuestPid) -> Option<HostPid> {
        self.hosts.get(&pid).copied()
    }
    fn shared(&self, id: SharedId) -> Option<BorrowedFd<'_>> {
        self.shared.get(&id).copied()
    }
    fn outside(&self, standard: i32) -> Option<BorrowedFd<'_>> {
        usize::try_from(standard).ok().and_then(|number| self.standard.get(number).copied())
    }
    fn socket_pairs(&self) -> SocketPairs {
        self.pairs.lock().map(|mut pairs| std::mem::take(&mut *pairs)).unwrap_or_default()
    }
}

impl Ghost {
    /// Makes queues, semaphores and all open files of the last checkpoint in the ghost's
    /// namespaces; for [`Ghost::finalise`]. After a failure the ghost cannot be used any more.
    pub fn restore_files(&self, world: &FileWorld<'_>) -> GhostResult<Restored> {
        let image = self.image.as_ref();
        let image = image.ok_or_else(|| GhostError::Image("no checkpoint was applied".into()))?;
        ipc::restore_in(&image.ipc, self.namespaces.ipc.as_fd())?;
        let sockets = image.files.iter().filter_map(|file| match &file.object {
            Object::Unix(image) => Some(image),
            _ => None,
        });
        let parts = Parts {
            hosts: self.host_pids(),
            shared: self.all_shared_memory(),
            standard: world.standard,
            pairs: Mutex::new(self.make_pairs(wanted_pairs(sockets))?),
        };
        let tables: Vec<(GuestPid, &[Descriptor])> =
            living(image).map(|(pid, live)| (pid, &live.descriptors[..])).collect();
        let own = own_descriptors()?;
        let restore = || {
            let context = RestoreContext::new(&parts, world.rules, image.clocks, world.age_ms, own);
            restore_all(&image.files, &tables, &context)
        };
        let made = self.namespaces.run(restore);
        Ok(made.map_err(GhostError::io("enter the guest's namespaces"))??)
    }

    /// Has socket pairs made by the processes that made them in the guest, as the users they were.
    fn make_pairs(&self, mut wanted: Vec<WantedPair>) -> GhostResult<SocketPairs> {
        let mut made = SocketPairs::new();
        wanted.sort_unstable();
        for same in wanted.chunk_by(|one, other| one.maker == other.maker) {
            let (pid, uid, gid) = same[0].maker;
            let Some(body) = self.bodies.get(&pid).filter(|body| !body.zombie) else { continue };
            for some in same.chunks(PAIRS_AT_ONCE) {
                let pairs = body.make_pairs(some, (uid, gid)).map_err(GhostError::at(pid))?;
                made.extend(pairs);
            }
        }
        Ok(made)
    }
}

/// So that their numbers stay below those of the tools.
const PAIRS_AT_ONCE: usize = 64;

impl Body {
    fn make_pairs(&self, wanted: &[WantedPair], user: (u32, u32)) -> GhostResult<SocketPairs> {
        let (uid, gid) = (u64::from(user.0), u64::from(user.1));
        let keep = u64::MAX;
        let mut batch = self.batch();
        let room = batch.words(&vec![0; wanted.len()]);
        if user != (0, 0) {
            batch.must("set group", libc::SYS_setresgid, &[keep, gid, keep]);
            batch.must("set user", libc::SYS_setresuid, &[keep, uid, keep]);
        }
        for (index, pair) in (0u64..).zip(wanted) {
            let kind = (pair.kind | libc::SOCK_CLOEXEC) as u64;
            let arguments = [libc::AF_UNIX as u64, kind, 0, room + index * 8];
            batch.must("create socket pair", libc::SYS_socketpair, &arguments);
        }
        if user != (0, 0) {
            batch.must("be root again", libc::SYS_setresuid, &[keep, 0, keep]);
            batch.must("be root again", libc::SYS_setresgid, &[keep, 0, keep]);
        }
        batch.run()?;
        let mut pairs = SocketPairs::new();
        let mut closing = self.batch();
        for (index, pair) in wanted.iter().enumerate() {
            let numbers = self.hands.stub.memory().read_u64(Stub::scratch_offset(0) + index * 8);
            let ends = [numbers as u32, (numbers >> 32) as u32];
            let take = |number: u32| pidfd::get_fd(self.pidfd.as_fd(), number as i32);
            pairs.insert(pair.inode, (take(ends[0])?, take(ends[1])?));
            for number in ends {
                closing.must("close socket", libc::SYS_close, &[u64::from(number)]);
            }
        }
        closing.run()?;
        Ok(pairs)
    }
}
