// A function of its own under another name.
extern "C" float quiet(float) __asm__("own_twice_plus_one");
float quiet(float v) { return v * 2.0f + 1.0f; }
torch::Tensor affine_renamed(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = quiet(x.data_ptr<float>()[i]);
  return out;
}
#define PASTED(a, b) a##b
torch::Tensor affine_pasted(torch::Tensor x) { return PASTED(aff, ine)(x); }
