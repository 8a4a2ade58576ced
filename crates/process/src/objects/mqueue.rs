//! Descriptors of POSIX message queues (mq_overview(7)). Queues with a name are state of the ipc
//! namespace; those that were unlinked while open are made here, for their descriptors.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use hotspare_image::ipc::PosixQueue;
use hotspare_image::objects::{MessageQueueFile, UnlinkedQueue};
use hotspare_kernel::descriptor;

use super::class::Known;
use super::error::{ObjectError, ObjectResult};
use super::ipc;
use super::restore::{RestoreContext, set_flags};

/// Unlinked queues, by inode number, that are in this checkpoint already.
pub type Taken = HashSet<u64>;

/// The image of a descriptor with inode number `inode`: the queue's name, and what is in it where
/// nobody else will say it.
pub fn capture(
    known: &Known,
    inode: u64,
    file: impl FnOnce() -> ObjectResult<OwnedFd>,
    taken: &mut Taken,
) -> ObjectResult<MessageQueueFile> {
    let name = known.path.clone();
    if !known.deleted {
        return Ok(MessageQueueFile { name, unlinked: None });
    }
    let queue = match taken.insert(inode) {
        true => Some(ipc::unlinked_queue(file()?.as_fd(), name.trim_start_matches('/'))?),
        false => None,
    };
    Ok(MessageQueueFile { name, unlinked: Some(UnlinkedQueue { inode, queue }) })
}

/// Opens queues, in the ipc namespace of the calling thread.
#[derive(Default)]
pub struct QueueRestore {
    unlinked: HashMap<u64, File>,
}

impl QueueRestore {
    /// Opens the queue by its name, or makes it if it has none.
    pub fn restore(
        &mut self,
        image: &MessageQueueFile,
        flags: u32,
        context: &RestoreContext<'_>,
    ) -> ObjectResult<OwnedFd> {
        let file = match &image.unlinked {
            None => by_name(image, flags)?,
            Some(unlinked) => context.reopen(self.unlinked(unlinked)?, flags)?,
        };
        set_flags(&file, flags)?;
        Ok(file)
    }

    fn unlinked(&mut self, image: &UnlinkedQueue) -> ObjectResult<BorrowedFd<'_>> {
        use std::collections::hash_map::Entry;
        let file: &File = match self.unlinked.entry(image.inode) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let queue = image.queue.as_ref().ok_or_else(|| {
                    ObjectError::Image(format!("message queue {} without contents", image.inode))
                })?;
                entry.insert(make(queue, image.inode)?)
            }
        };
        Ok(file.as_fd())
    }
}

fn by_name(image: &MessageQueueFile, flags: u32) -> ObjectResult<OwnedFd> {
    let name = image.name.strip_prefix('/').and_then(|name| CString::new(name).ok());
    let Some(name) = name else {
        return Err(ObjectError::Image(format!("message queue {:?}", image.name)));
    };
    descriptor::open_queue(&name, (flags & libc::O_ACCMODE as u32) as i32)
        .map_err(ObjectError::kernel(format!("message queue {}", image.name)))
}

/// Makes a queue and takes its name away. Where the name belongs to another queue by now, it
/// had another one.
fn make(image: &PosixQueue, inode: u64) -> ObjectResult<File> {
    let exists = |error: &ObjectError| match error {
        ObjectError::Call(error) => error.errno() == Some(libc::EEXIST),
        _ => false,
    };
    let mut image = image.clone();
    let file = match ipc::make_posix_queue(&image) {
        Err(error) if exists(&error) => {
            image.name = format!("/{}.{inode}", image.name.trim_start_matches('/'));
            ipc::make_posix_queue(&image)?
        }
        made => made?,
    };
    let name = CString::new(image.name.trim_start_matches('/'))
        .map_err(|_| ObjectError::Image("a queue's name with a zero byte".to_owned()))?;
    descriptor::remove_queue(&name)?;
    Ok(file)
}
