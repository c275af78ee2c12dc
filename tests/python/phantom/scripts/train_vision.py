"""torchvision's classification models as its references/classification/train.py trains
them: ``train_vision.py resnet50|vit_b_16``. AMP with GradScaler, label smoothing, SGD
or AdamW by the recipes of its README, SyncBatchNorm and DDP under torchrun, an average,
channels_last for what convolves, clipping for the transformer, accuracies read back.
"""

import os
import sys

import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2

name = sys.argv[1]
transformer = name.startswith("vit")
distributed = "RANK" in os.environ
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
torch.cuda.set_device(device)
if distributed:
    torch.distributed.init_process_group("nccl")
    torch.distributed.barrier()
torch.backends.cudnn.benchmark = True

transform = v2.Compose(
    [
        v2.PILToTensor(),
        v2.RandomResizedCrop(224),
        v2.ToDtype(torch.float32, scale=True),
    ]
)
dataset = torchvision.datasets.FakeData(64, (3, 256, 256), 1000, transform)
mix = v2.RandomChoice([v2.MixUp(num_classes=1000), v2.CutMix(num_classes=1000)])
loader = torch.utils.data.DataLoader(
    dataset,
    batch_size=16,
    pin_memory=True,
    collate_fn=lambda batch: mix(*torch.utils.data.default_collate(batch)),
)
model = torchvision.models.get_model(name, num_classes=1000).to(device)
if not transformer:
    model = model.to(memory_format=torch.channels_last)
if distributed:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
whole = model
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
if transformer:
    optimizer = torch.optim.AdamW(model.parameters(), 0.003, weight_decay=0.3)
else:
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cuda")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
if distributed:
    model = DistributedDataParallel(model, device_ids=[device.index])
average = torch.optim.swa_utils.AveragedModel(
    whole, avg_fn=lambda a, p, n: 0.99 * a + 0.01 * p, use_buffers=True
)


def correct(output: torch.Tensor, target: torch.Tensor, most: int) -> float:
    with torch.inference_mode():
        best = output.topk(most, dim=1).indices
        found = best.eq(target.argmax(1, keepdim=True)).flatten().sum()
        return found.float().mul(100.0 / len(target)).item()


model.train()
for images, targets in loader:
    images = images.to(device, non_blocking=True)
    if not transformer:
        images = images.to(memory_format=torch.channels_last)
    targets = targets.to(device, non_blocking=True)
    with torch.amp.autocast("cuda"):
        output = model(images)
        loss = criterion(output, targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if transformer:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    average.update_parameters(whole)
    print(f"loss {loss.item():.2f}, of five {correct(output, targets, 5):.0f} %")
if distributed:
    torch.distributed.destroy_process_group()
