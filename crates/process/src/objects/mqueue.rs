//! Descriptors of POSIX message queues (mq_overview(7)). The queues themselves are state of the
//! ipc namespace.

use std::ffi::CString;
use std::os::fd::OwnedFd;

use hotspare_image::objects::MessageQueueFile;
use hotspare_kernel::descriptor;

use super::class::Known;
use super::error::{ObjectError, ObjectResult};
use super::restore::set_flags;

/// The image of a descriptor: the queue's name.
pub fn capture(known: &Known) -> ObjectResult<MessageQueueFile> {
    if known.deleted {
        let reason = "the queue was unlinked, so that nobody can open it again";
        return Err(ObjectError::refused(format!("message queue {}", known.path), reason));
    }
    Ok(MessageQueueFile { name: known.path.clone() })
}

/// Opens the queue by its name, in the ipc namespace of the calling thread.
pub fn restore(image: &MessageQueueFile, flags: u32) -> ObjectResult<OwnedFd> {
    let name = image.name.strip_prefix('/').and_then(|name| CString::new(name).ok());
    let Some(name) = name else {
        return Err(ObjectError::Image(format!("message queue {:?}", image.name)));
    };
    let file = descriptor::open_queue(&name, (flags & libc::O_ACCMODE as u32) as i32)
        .map_err(ObjectError::kernel(format!("message queue {}", image.name)))?;
    set_flags(&file, flags)?;
    Ok(file)
}
